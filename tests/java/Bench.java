import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.conf.ClientConfiguration;

/**
 * Rate of unthrottled adds and reads.
 *
 * <p>Bench METADATA-URI v2|v3 add AMOUNT SIZE E W A [IN-FLIGHT]: AMOUNT is a number of entries, or seconds as `120s`; prints
 * {"ledgerId", "entries", "seconds", "perSecond"}, the ledger is closed and stays. IN-FLIGHT (10000) bounds the memory.
 *
 * <p>Bench METADATA-URI v2|v3 read LEDGER-ID [AT-A-TIME]: reads it all, AT-A-TIME (500) entries a call, two calls in flight.
 */
public final class Bench {
    private Bench() {}

    public static void main(String[] arguments) {
        Support.main(() -> run(arguments));
    }

    private static void run(String[] arguments) throws Exception {
        ClientConfiguration configuration = Support.configuration(arguments[0], Support.isV2(arguments[1]));
        configuration.setAddEntryTimeout(60);
        BookKeeper client = new BookKeeper(configuration);
        try {
            if (arguments[2].equals("add")) {
                add(client, arguments);
            } else {
                read(client, arguments);
            }
        } catch (Exception | AssertionError error) {
            // The client's threads would keep the program alive for a while.
            error.printStackTrace();
            System.exit(1);
        }
        Support.abandon(client);
    }

    private static void report(long ledgerId, long entries, long nanoseconds) throws Exception {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("ledgerId", Long.toString(ledgerId));
        line.put("entries", entries);
        line.put("seconds", nanoseconds / 1e9);
        line.put("perSecond", entries / (nanoseconds / 1e9));
        Support.print(line);
    }

    private static void add(BookKeeper client, String[] arguments) throws Exception {
        boolean timed = arguments[3].endsWith("s");
        long amount = Long.parseLong(timed ? arguments[3].substring(0, arguments[3].length() - 1) : arguments[3]);
        byte[] payload = Support.payload("bench", 0, Integer.parseInt(arguments[4]));
        int inFlight = arguments.length > 8 ? Integer.parseInt(arguments[8]) : 10_000;
        LedgerHandle handle = client.createLedger(
                Integer.parseInt(arguments[5]), Integer.parseInt(arguments[6]), Integer.parseInt(arguments[7]),
                DigestType.CRC32C, new byte[0]);
        Semaphore permits = new Semaphore(inFlight);
        AtomicInteger failure = new AtomicInteger(BKException.Code.OK);
        long start = System.nanoTime();
        long entries = 0;
        while (timed ? System.nanoTime() - start < amount * 1_000_000_000L : entries < amount) {
            permits.acquire();
            Support.check(failure.get() == BKException.Code.OK, "add: " + BKException.getMessage(failure.get()));
            handle.asyncAddEntry(payload, (code, from, entryId, context) -> {
                if (code != BKException.Code.OK) {
                    failure.set(code);
                }
                permits.release();
            }, null);
            entries++;
        }
        permits.acquire(inFlight);
        long nanoseconds = System.nanoTime() - start;
        Support.check(failure.get() == BKException.Code.OK, "add: " + BKException.getMessage(failure.get()));
        handle.close();
        report(handle.getId(), entries, nanoseconds);
    }

    private static void read(BookKeeper client, String[] arguments) throws Exception {
        long atATime = arguments.length > 4 ? Long.parseLong(arguments[4]) : 500;
        LedgerHandle handle = client.openLedger(Long.parseLong(arguments[3]), DigestType.CRC32C, new byte[0]);
        long last = handle.getLastAddConfirmed();
        AtomicLong bytes = new AtomicLong();
        AtomicLong found = new AtomicLong();
        Semaphore permits = new Semaphore(2);
        AtomicInteger failures = new AtomicInteger();
        long start = System.nanoTime();
        for (long first = 0; first <= last; first += atATime) {
            permits.acquire();
            handle.readAsync(first, Math.min(last, first + atATime - 1)).whenComplete((entries, error) -> {
                if (error == null) {
                    try (LedgerEntries batch = entries) {
                        for (LedgerEntry entry : batch) {
                            bytes.addAndGet(entry.getEntryBuffer().readableBytes());
                            found.incrementAndGet();
                        }
                    }
                } else {
                    failures.incrementAndGet();
                }
                permits.release();
            });
        }
        permits.acquire(2);
        long nanoseconds = System.nanoTime() - start;
        Support.check(failures.get() == 0, "failed reads: " + failures.get());
        Support.check(found.get() == last + 1 && bytes.get() == handle.getLength(), "read " + found + " of " + (last + 1));
        report(handle.getId(), found.get(), nanoseconds);
        handle.close();
    }
}
