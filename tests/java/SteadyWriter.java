import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.conf.ClientConfiguration;

/**
 * Writes ledgers, one after the other, whatever happens to the bookies, until a line (or the end) comes on stdin.
 *
 * <p>SteadyWriter METADATA-URI v2|v3 ENTRIES-A-LEDGER BURST PAUSE-MS: bursts of pipelined adds with pauses between them, two
 * bookies an ensemble. Entry N of a ledger is the text "LEDGER-ID N " over and over, 1 + N * 37 % 1500 bytes of it. Prints for
 * each ledger {ledgerId, acknowledged (how many entries were), closed, digestType, password}. A ledger in which an add failed
 * stays open.
 */
public final class SteadyWriter {
    private static final byte[] PASSWORD = Support.bytes("steady");
    private static final int WAIT_S = 60;

    private SteadyWriter() {}

    public static void main(String[] arguments) {
        Support.main(() -> run(arguments));
    }

    private static void run(String[] arguments) throws Exception {
        ClientConfiguration configuration = Support.configuration(arguments[0], Support.isV2(arguments[1]));
        configuration.setAddEntryTimeout(5);
        BookKeeper client = new BookKeeper(configuration);
        int entriesMax = Integer.parseInt(arguments[2]);
        int burst = Integer.parseInt(arguments[3]);
        long pauseMs = Long.parseLong(arguments[4]);
        Thread thread = new Thread(() -> {
            try {
                System.in.read();
            } catch (java.io.IOException error) {
                throw new java.io.UncheckedIOException(error);
            }
        });
        thread.setDaemon(true);
        thread.start();
        DigestType[] digestTypes = DigestType.values();
        for (int index = 0; thread.isAlive(); index++) {
            LedgerHandle handle;
            try {
                handle = client.createLedger(2, 2, 2, digestTypes[index % digestTypes.length], PASSWORD);
            } catch (BKException error) {
                Thread.sleep(50);
                continue;
            }
            write(handle, entriesMax, burst, pauseMs, thread);
        }
        client.close();
        System.exit(0);
    }

    static byte[] payload(long ledgerId, long entryId) {
        byte[] word = Support.bytes(ledgerId + " " + entryId + " ");
        byte[] bytes = new byte[(int) (1 + entryId * 37 % 1500)];
        for (int index = 0; index < bytes.length; index++) {
            bytes[index] = word[index % word.length];
        }
        return bytes;
    }

    private static void write(LedgerHandle handle, int entriesMax, int burst, long pauseMs, Thread until) throws Exception {
        Semaphore permits = new Semaphore(4 * burst);
        AtomicLong acknowledged = new AtomicLong();
        AtomicInteger failure = new AtomicInteger(BKException.Code.OK);
        for (int entryId = 0; entryId < entriesMax && until.isAlive() && failure.get() == BKException.Code.OK; entryId++) {
            Support.check(permits.tryAcquire(WAIT_S, TimeUnit.SECONDS), "no acknowledgement and no error");
            handle.asyncAddEntry(payload(handle.getId(), entryId), (code, from, id, context) -> {
                if (code != BKException.Code.OK) {
                    failure.set(code);
                } else if (failure.get() == BKException.Code.OK) {
                    acknowledged.incrementAndGet();
                }
                permits.release();
            }, null);
            if (entryId % burst == burst - 1) {
                Thread.sleep(pauseMs);
            }
        }
        Support.check(permits.tryAcquire(4 * burst, WAIT_S, TimeUnit.SECONDS), "no acknowledgement and no error at the end");
        boolean closed = false;
        if (failure.get() == BKException.Code.OK) {
            try {
                handle.close();
                closed = true;
            } catch (BKException error) {
                failure.set(error.getCode());
            }
        }
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("ledgerId", Long.toString(handle.getId()));
        line.put("acknowledged", acknowledged.get());
        line.put("closed", closed);
        line.put("code", failure.get());
        line.put("digestType", handle.getLedgerMetadata().getDigestType().toString());
        line.put("password", Support.base64(PASSWORD));
        Support.print(line);
    }
}
