import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Semaphore;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.api.LastConfirmedAndEntry;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.conf.ClientConfiguration;

/**
 * Rates and latencies of reads, ensembles and quorums of two bookies. One client runs many commands, so that its JVM stays warm.
 *
 * <p>ReadBench METADATA-URI v2|v3: runs the commands on stdin, and prints a line for each: {"entries", "perSecond", "p50Ms",
 * "p99Ms" (of a read), "added", "addsPerSecond", "addP50Ms", "addP99Ms", "addP999Ms" (of the adds beside it), "clientSeconds"
 * (processor time of this process)}.
 *
 * <pre>
 * write LEDGERS ENTRIES SIZE              new ledgers, which the other commands read; closed
 * add SECONDS SIZE RATE                   adds alone; RATE 0: as fast as they go
 * delete EACH                             deletes the ledgers of `write`, but one of EACH
 * read KIND READERS SECONDS RATE SIZE     KIND: ledgers (whole, 100 entries a call), batch (the same by batchRead), random
 *                                         (single entries); SECONDS 0: each ledger once. RATE adds a second beside it
 * tail LEDGERS SECONDS SIZE               new ledgers, each with a writer and a reader that gets each entry once it is
 *                                         confirmed: by long polls in v3; in v2, which has none, the writer wakes it.
 *                                         What is read after the last add, while ledgers close, does not count
 * </pre>
 */
public final class ReadBench {
    private static final int AT_A_TIME = 100;
    private static final int IN_FLIGHT_MAX = 10_000;
    /** Adds in flight, and entries by which all readers together may be behind, while ledgers are tailed. */
    private static final int TAILED_IN_FLIGHT_MAX = 2_000;
    private static final int BEHIND_MAX = 10_000;
    private static final long POLL_MS = 1000;

    private final BookKeeper client;
    private final boolean v2;
    private final List<Long> ledgers = new ArrayList<>();
    private int entries;

    private ReadBench(BookKeeper client, boolean v2) {
        this.client = client;
        this.v2 = v2;
    }

    public static void main(String[] arguments) {
        Support.main(() -> {
            boolean v2 = Support.isV2(arguments[1]);
            ClientConfiguration configuration = Support.configuration(arguments[0], v2);
            configuration.setAddEntryTimeout(120);
            configuration.setReadEntryTimeout(120);
            configuration.setSpeculativeReadTimeout(0);
            ReadBench bench = new ReadBench(new BookKeeper(configuration), v2);
            BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                Duration before = processorTime();
                Map<String, Object> answer = bench.run(line.split(" "));
                answer.put("clientSeconds", processorTime().minus(before).toNanos() / 1e9);
                Support.print(answer);
            }
        });
    }

    private static Duration processorTime() {
        return ProcessHandle.current().info().totalCpuDuration().orElse(Duration.ZERO);
    }

    private Map<String, Object> run(String[] words) throws Exception {
        if (words[0].equals("write")) {
            return write(Integer.parseInt(words[1]), Integer.parseInt(words[2]), Integer.parseInt(words[3]));
        } else if (words[0].equals("add")) {
            Adds adds = new Adds(Double.parseDouble(words[3]), Integer.parseInt(words[2]));
            Thread.sleep(Long.parseLong(words[1]) * 1000);
            return adds.end(new LinkedHashMap<>());
        } else if (words[0].equals("delete")) {
            return delete(Integer.parseInt(words[1]));
        } else if (words[0].equals("read")) {
            return read(words[1], Integer.parseInt(words[2]), Double.parseDouble(words[3]), Double.parseDouble(words[4]),
                    Integer.parseInt(words[5]));
        }
        return tail(Integer.parseInt(words[1]), Double.parseDouble(words[2]), Integer.parseInt(words[3]));
    }

    /** Nanoseconds of many operations. */
    private static final class Latencies {
        private long[] values = new long[1 << 16];
        private int count;

        synchronized void add(long nanoseconds) {
            if (count == values.length) {
                values = Arrays.copyOf(values, 2 * count);
            }
            values[count++] = nanoseconds;
        }

        /** Milliseconds. */
        synchronized double quantile(double share) {
            long[] sorted = Arrays.copyOf(values, count);
            Arrays.sort(sorted);
            return count == 0 ? 0 : sorted[Math.min(count - 1, (int) (share * count))] / 1e6;
        }
    }

    private static Map<String, Object> result(long entries, long nanoseconds, Latencies latencies) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("entries", entries);
        line.put("perSecond", entries / (nanoseconds / 1e9));
        line.put("p50Ms", latencies.quantile(0.5));
        line.put("p99Ms", latencies.quantile(0.99));
        return line;
    }

    private LedgerHandle create() throws Exception {
        return client.createLedger(2, 2, 2, DigestType.CRC32C, new byte[0]);
    }

    /** A writer of one ledger: adds in flight are bounded, and the first failure ends it. */
    private static final class Writer {
        private final int inFlightMax;
        private final Semaphore permits;
        private final AtomicInteger failure = new AtomicInteger(BKException.Code.OK);

        Writer(int inFlightMax) {
            this.inFlightMax = inFlightMax;
            permits = new Semaphore(inFlightMax);
        }

        void add(LedgerHandle handle, byte[] payload, Runnable added) throws Exception {
            permits.acquire();
            check();
            handle.asyncAddEntry(payload, (code, from, entryId, context) -> {
                failure.compareAndSet(BKException.Code.OK, code);
                permits.release();
                added.run();
            }, null);
        }

        void finish() throws Exception {
            permits.acquire(inFlightMax);
            check();
        }

        private void check() {
            Support.check(failure.get() == BKException.Code.OK, "add: " + BKException.getMessage(failure.get()));
        }
    }

    private Map<String, Object> write(int count, int entries, int size) throws Exception {
        byte[] payload = Support.payload("bench", 0, size);
        List<LedgerHandle> handles = new ArrayList<>();
        for (int index = 0; index < count; index++) {
            handles.add(create());
        }
        Writer writer = new Writer(IN_FLIGHT_MAX);
        long start = System.nanoTime();
        for (int entry = 0; entry < entries; entry++) {
            for (LedgerHandle handle : handles) {
                writer.add(handle, payload, () -> { });
            }
        }
        writer.finish();
        long nanoseconds = System.nanoTime() - start;
        ledgers.clear();
        for (LedgerHandle handle : handles) {
            handle.close();
            ledgers.add(handle.getId());
        }
        this.entries = entries;
        return result((long) count * entries, nanoseconds, new Latencies());
    }

    private Map<String, Object> delete(int each) throws Exception {
        List<Long> kept = new ArrayList<>();
        for (int index = 0; index < ledgers.size(); index++) {
            if (index % each == 0) {
                kept.add(ledgers.get(index));
            } else {
                client.deleteLedger(ledgers.get(index));
            }
        }
        int deleted = ledgers.size() - kept.size();
        ledgers.retainAll(kept);
        return new LinkedHashMap<>(Map.of("deleted", deleted));
    }

    /** Adds to one ledger in a thread of its own, until `end`. */
    private final class Adds {
        private final Latencies latencies = new Latencies();
        private final AtomicBoolean ends = new AtomicBoolean();
        private final AtomicReference<Exception> error = new AtomicReference<>();
        private final Thread thread;
        private long count;
        private long nanoseconds;

        Adds(double rate, int size) throws Exception {
            LedgerHandle handle = create();
            byte[] payload = Support.payload("bench", 0, size);
            thread = new Thread(() -> {
                try {
                    Writer writer = new Writer(IN_FLIGHT_MAX);
                    long start = System.nanoTime();
                    while (!ends.get()) {
                        if (rate > 0 && count > (System.nanoTime() - start) / 1e9 * rate) {
                            Thread.sleep(1);
                            continue;
                        }
                        long began = System.nanoTime();
                        writer.add(handle, payload, () -> latencies.add(System.nanoTime() - began));
                        count++;
                    }
                    writer.finish();
                    nanoseconds = System.nanoTime() - start;
                    handle.close();
                } catch (Exception failure) {
                    error.set(failure);
                }
            });
            thread.start();
        }

        Map<String, Object> end(Map<String, Object> line) throws Exception {
            ends.set(true);
            thread.join();
            if (error.get() != null) {
                throw error.get();
            }
            line.put("added", count);
            line.put("addsPerSecond", count / (nanoseconds / 1e9));
            line.put("addP50Ms", latencies.quantile(0.5));
            line.put("addP99Ms", latencies.quantile(0.99));
            line.put("addP999Ms", latencies.quantile(0.999));
            return line;
        }
    }

    /** Run `body` in some threads, and rethrow what the first of them throws. */
    private static void inThreads(int count, Support.Body body) throws Exception {
        AtomicReference<Throwable> error = new AtomicReference<>();
        List<Thread> threads = new ArrayList<>();
        for (int index = 0; index < count; index++) {
            Thread thread = new Thread(() -> {
                try {
                    body.run();
                } catch (Throwable failure) {
                    error.compareAndSet(null, failure);
                }
            });
            threads.add(thread);
            thread.start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
        if (error.get() != null) {
            throw new Exception(error.get());
        }
    }

    private Map<String, Object> read(String kind, int readers, double seconds, double rate, int size) throws Exception {
        Adds adds = rate > 0 ? new Adds(rate, size) : null;
        Latencies latencies = new Latencies();
        AtomicLong found = new AtomicLong();
        AtomicInteger next = new AtomicInteger();
        long start = System.nanoTime();
        inThreads(readers, () -> {
            for (int number = next.getAndIncrement(); seconds > 0 || number < ledgers.size(); number = next.getAndIncrement()) {
                if (seconds > 0 && System.nanoTime() - start > seconds * 1e9) {
                    return;
                }
                LedgerHandle handle = client.openLedgerNoRecovery(
                        ledgers.get(number % ledgers.size()), DigestType.CRC32C, new byte[0]);
                long last = handle.getLastAddConfirmed();
                Support.check(last == entries - 1, "last entry " + last);
                int atATime = kind.equals("random") ? 1 : AT_A_TIME;
                for (long first = 0; first <= last; first += atATime) {
                    long at = atATime == 1 ? ThreadLocalRandom.current().nextLong(last + 1) : first;
                    int count = (int) Math.min(atATime, last + 1 - at);
                    long began = System.nanoTime();
                    while (count > 0) {
                        int got = take(kind.equals("batch") ? batch(handle, at, count) : handle.readAsync(at, at + count - 1), at);
                        at += got;
                        count -= got;
                        found.addAndGet(got);
                    }
                    latencies.add(System.nanoTime() - began);
                    if (seconds > 0 && System.nanoTime() - start > seconds * 1e9) {
                        break;
                    }
                }
                handle.close();
            }
        });
        Map<String, Object> line = result(found.get(), System.nanoTime() - start, latencies);
        return adds == null ? line : adds.end(line);
    }

    /** Releases the entries, which begin with `first`; returns how many there are. */
    private static int take(CompletableFuture<LedgerEntries> read, long first) throws Exception {
        int count = 0;
        try (LedgerEntries entries = read.get()) {
            for (LedgerEntry entry : entries) {
                Support.check(entry.getEntryId() == first + count && entry.getLength() > 0, "entry " + entry.getEntryId());
                count++;
            }
        }
        Support.check(count > 0, "no entry");
        return count;
    }

    /** The method is there from 4.17 on. */
    @SuppressWarnings("unchecked")
    private static CompletableFuture<LedgerEntries> batch(LedgerHandle handle, long first, int count) throws Exception {
        return (CompletableFuture<LedgerEntries>) LedgerHandle.class
                .getMethod("batchReadAsync", long.class, int.class, long.class).invoke(handle, first, count, 4L << 20);
    }

    /** One ledger that is written and tailed; `times` are the nanoseconds at which its entries were handed to the client. */
    private static final class Tailed {
        final LedgerHandle writer;
        final Semaphore news = new Semaphore(0);
        private long[] times = new long[1024];
        private int count;

        Tailed(LedgerHandle writer) {
            this.writer = writer;
        }

        synchronized void note() {
            if (count == times.length) {
                times = Arrays.copyOf(times, 2 * count);
            }
            times[count++] = System.nanoTime();
        }

        synchronized long time(long entry) {
            return times[(int) entry];
        }

        synchronized int count() {
            return count;
        }
    }

    private Map<String, Object> tail(int count, double seconds, int size) throws Exception {
        byte[] payload = Support.payload("bench", 0, size);
        List<Tailed> all = new ArrayList<>();
        for (int index = 0; index < count; index++) {
            all.add(new Tailed(create()));
        }
        Latencies latencies = new Latencies();
        AtomicLong found = new AtomicLong();
        AtomicReference<Exception> error = new AtomicReference<>();
        AtomicLong nanoseconds = new AtomicLong();
        long start = System.nanoTime();
        Thread writing = new Thread(() -> {
            try {
                Writer writer = new Writer(TAILED_IN_FLIGHT_MAX);
                long added = 0;
                while (System.nanoTime() - start < seconds * 1e9) {
                    if (added > found.get() + BEHIND_MAX && error.get() == null) {
                        Thread.sleep(1);
                        continue;
                    }
                    added += all.size();
                    for (Tailed tailed : all) {
                        tailed.note();
                        writer.add(tailed.writer, payload, tailed.news::release);
                    }
                }
                writer.finish();
                nanoseconds.set(System.nanoTime() - start);
                for (Tailed tailed : all) {
                    tailed.writer.close();
                    tailed.news.release();
                }
            } catch (Exception failure) {
                error.set(failure);
                all.forEach(tailed -> tailed.news.release());
            }
        });
        writing.start();
        AtomicInteger next = new AtomicInteger();
        inThreads(count, () -> {
            Tailed tailed = all.get(next.getAndIncrement());
            LedgerHandle reader = v2 ? tailed.writer
                    : client.openLedgerNoRecovery(tailed.writer.getId(), DigestType.CRC32C, new byte[0]);
            long entry = 0;
            // A long poll for an entry behind the end of a closed ledger is answered at once, without a bookie.
            while (error.get() == null && !(reader.isClosed() && entry > reader.getLastAddConfirmed())) {
                long begin = entry;
                long confirmed;
                if (v2) {
                    tailed.news.acquire();
                    tailed.news.drainPermits();
                    confirmed = tailed.writer.getLastAddConfirmed();
                } else {
                    try (LastConfirmedAndEntry polled = reader.readLastAddConfirmedAndEntryAsync(entry, POLL_MS, false).get()) {
                        confirmed = polled.getLastAddConfirmed();
                        entry += polled.hasEntry() ? 1 : 0;
                    }
                }
                while (entry <= confirmed) {
                    entry += take(reader.readAsync(entry, Math.min(confirmed, entry + AT_A_TIME - 1)), entry);
                }
                if (nanoseconds.get() == 0) {
                    for (long got = begin; got < entry; got++) {
                        latencies.add(System.nanoTime() - tailed.time(got));
                    }
                    found.addAndGet(entry - begin);
                }
            }
            Support.check(error.get() != null || entry == tailed.count(), "read " + entry + " of " + tailed.count());
            if (!v2) {
                reader.close();
            }
        });
        writing.join();
        if (error.get() != null) {
            throw error.get();
        }
        return result(found.get(), nanoseconds.get(), latencies);
    }
}
