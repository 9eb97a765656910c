import java.lang.reflect.InvocationTargetException;
import java.util.ArrayList;
import java.util.Enumeration;
import java.util.EnumSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.LedgerEntry;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.api.LastConfirmedAndEntry;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.WriteFlag;
import org.apache.bookkeeper.client.api.WriteHandle;
import org.apache.bookkeeper.conf.ClientConfiguration;

/**
 * Everything that a client asks of bookies, whoever serves them: Roundtrip METADATA-URI v2|v3 [ENTRIES].
 *
 * <p>Prints {"step": …} for each that went well; ends with 1 and the reason at the first that did not. Needs three bookies.
 */
public final class Roundtrip {
    private static final byte[] PASSWORD = Support.bytes("round trip");
    private static final int WAIT_S = 60;

    private final String metadataUri;
    private final boolean v2;
    private final int count;

    private Roundtrip(String metadataUri, boolean v2, int count) {
        this.metadataUri = metadataUri;
        this.v2 = v2;
        this.count = count;
    }

    public static void main(String[] arguments) {
        int count = arguments.length > 2 ? Integer.parseInt(arguments[2]) : 400;
        Support.main(() -> new Roundtrip(arguments[0], Support.isV2(arguments[1]), count).run());
    }

    private void run() throws Exception {
        ClientConfiguration configuration = Support.configuration(metadataUri, v2);
        configuration.setExplictLacInterval(v2 ? 0 : 50);
        BookKeeper writerClient = new BookKeeper(configuration);
        try (BookKeeper readerClient = Support.connect(metadataUri, v2)) {
            for (DigestType digestType : DigestType.values()) {
                writeCloseRead(writerClient, readerClient, digestType);
            }
            chosenId(writerClient, readerClient);
            tailFenceRecoverDelete(writerClient, readerClient);
            refusals(writerClient, readerClient);
            if (!v2) {
                deferredSync(writerClient, readerClient);
            }
        }
        Support.abandon(writerClient);
    }

    private static void passed(String step, Object... details) throws Exception {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("step", step);
        for (int index = 0; index < details.length; index += 2) {
            line.put((String) details[index], details[index + 1]);
        }
        Support.print(line);
    }

    private static int size(long entryId) {
        return entryId == 7 ? 100_000 : (int) (entryId * 37 % 1000);
    }

    private static CompletableFuture<Long> add(LedgerHandle handle, byte[] payload) {
        CompletableFuture<Long> added = new CompletableFuture<>();
        handle.asyncAddEntry(payload, (code, from, entryId, context) -> {
            if (code == BKException.Code.OK) {
                added.complete(entryId);
            } else {
                added.completeExceptionally(BKException.create(code));
            }
        }, null);
        return added;
    }

    private static void addPipelined(LedgerHandle handle, String name, long first, int count) throws Exception {
        List<CompletableFuture<Long>> added = new ArrayList<>();
        for (long entryId = first; entryId < first + count; entryId++) {
            added.add(add(handle, Support.payload(name, entryId, size(entryId))));
        }
        for (int index = 0; index < count; index++) {
            long entryId = added.get(index).get(WAIT_S, TimeUnit.SECONDS);
            Support.check(entryId == first + index, name + ": entry id " + entryId);
        }
    }

    private static void checkEntries(LedgerHandle reader, String name, long last) throws Exception {
        long length = 0;
        Enumeration<LedgerEntry> entries = reader.readEntries(0, last);
        for (long entryId = 0; entryId <= last; entryId++) {
            LedgerEntry entry = entries.nextElement();
            length += size(entryId);
            Support.check(entry.getEntryId() == entryId, name + ": read entry " + entry.getEntryId());
            Support.check(entry.getLength() == length, name + ": length at " + entryId + " is " + entry.getLength());
            byte[] expected = Support.payload(name, entryId, size(entryId));
            Support.check(java.util.Arrays.equals(entry.getEntry(), expected), name + ": payload of " + entryId);
        }
        Support.check(!entries.hasMoreElements(), name + ": too many entries");
    }

    private void writeCloseRead(BookKeeper writerClient, BookKeeper readerClient, DigestType digestType) throws Exception {
        String name = "round-" + digestType;
        LedgerHandle writer = writerClient.createLedger(3, 2, 2, digestType, PASSWORD);
        addPipelined(writer, name, 0, count);
        writer.close();
        LedgerHandle reader = readerClient.openLedger(writer.getId(), digestType, PASSWORD);
        Support.check(reader.isClosed(), name + " is not closed");
        Support.check(reader.getLastAddConfirmed() == count - 1, name + ": LAC " + reader.getLastAddConfirmed());
        checkEntries(reader, name, count - 1);
        int batch = batchRead(reader, name);
        reader.close();
        passed("write, close, read", "digestType", digestType.toString(), "ledgerId", writer.getId(), "batch", batch);
    }

    /** Entries that one batch read gave (4.17 and newer); -1 where the client has none. */
    private int batchRead(LedgerHandle reader, String name) throws Exception {
        LedgerEntries batch;
        try {
            batch = (LedgerEntries) LedgerHandle.class
                    .getMethod("batchRead", long.class, int.class, long.class).invoke(reader, 10L, 20, 1L << 20);
        } catch (NoSuchMethodException error) {
            return -1;
        } catch (InvocationTargetException error) {
            throw (Exception) error.getCause();
        }
        int found = 0;
        for (org.apache.bookkeeper.client.api.LedgerEntry entry : batch) {
            long entryId = 10 + found++;
            Support.check(entry.getEntryId() == entryId, name + ": batch entry " + entry.getEntryId());
            byte[] expected = Support.payload(name, entryId, size(entryId));
            Support.check(java.util.Arrays.equals(entry.getEntryBytes(), expected), name + ": batch payload " + entryId);
        }
        batch.close();
        Support.check(found >= 1, name + ": empty batch");
        return found;
    }

    private void chosenId(BookKeeper writerClient, BookKeeper readerClient) throws Exception {
        long ledgerId = (1L << 40) + System.nanoTime() % (1L << 39);
        String name = "chosen";
        LedgerHandle writer = writerClient.createLedgerAdv(ledgerId, 3, 3, 2, DigestType.CRC32C, PASSWORD, Map.of());
        for (long entryId = 0; entryId < 10; entryId++) {
            writer.addEntry(entryId, Support.payload(name, entryId, size(entryId)));
        }
        writer.close();
        LedgerHandle reader = readerClient.openLedger(ledgerId, DigestType.CRC32C, PASSWORD);
        checkEntries(reader, name, 9);
        reader.close();
        passed("chosen ledger id", "ledgerId", ledgerId);
    }

    private void tailFenceRecoverDelete(BookKeeper writerClient, BookKeeper readerClient) throws Exception {
        String name = "tail";
        LedgerHandle writer = writerClient.createLedger(3, 2, 2, DigestType.CRC32C, PASSWORD);
        long ledgerId = writer.getId();
        for (long entryId = 0; entryId < 10; entryId++) {
            addPipelined(writer, name, entryId, 1);
        }

        LedgerHandle reader = readerClient.openLedgerNoRecovery(ledgerId, DigestType.CRC32C, PASSWORD);
        long confirmed = reader.readLastConfirmed();
        Support.check(confirmed >= 8 && confirmed <= 9, "LAC of an open ledger: " + confirmed);
        checkEntries(reader, name, 8);
        passed("LAC of an open ledger", "lastAddConfirmed", confirmed);

        if (!v2) {
            long explicit = -1;
            for (int attempt = 0; explicit < 9 && attempt < 400; attempt++) {
                explicit = reader.readExplicitLastConfirmed();
                Thread.sleep(25);
            }
            Support.check(explicit == 9, "explicit LAC " + explicit);
            passed("explicit LAC", "lastAddConfirmed", explicit);

            CompletableFuture<LastConfirmedAndEntry> tail = reader.readLastAddConfirmedAndEntryAsync(10, 20_000, false);
            Thread.sleep(300);
            Support.check(!tail.isDone(), "the long poll did not wait");
            addPipelined(writer, name, 10, 1);
            addPipelined(writer, name, 11, 1);
            try (LastConfirmedAndEntry found = tail.get(WAIT_S, TimeUnit.SECONDS)) {
                Support.check(found.getLastAddConfirmed() >= 10, "long poll: LAC " + found.getLastAddConfirmed());
                Support.check(found.hasEntry() && found.getEntry().getEntryId() == 10, "long poll: entry");
                byte[] expected = Support.payload(name, 10, size(10));
                Support.check(java.util.Arrays.equals(found.getEntry().getEntryBytes(), expected), "long poll: payload");
            }
            passed("long poll", "entryId", 10);
        } else {
            addPipelined(writer, name, 10, 2);
        }

        LedgerHandle recovered = readerClient.openLedger(ledgerId, DigestType.CRC32C, PASSWORD);
        Support.check(recovered.getLastAddConfirmed() == 11, "recovered LAC " + recovered.getLastAddConfirmed());
        checkEntries(recovered, name, 11);
        Support.check(recovered.isClosed(), "recovery did not close the ledger");
        passed("recovery", "lastEntryId", 11);

        int code = codeOf(add(writer, new byte[1]));
        Support.check(code == BKException.Code.LedgerFencedException || code == BKException.Code.LedgerClosedException,
                "add to a fenced ledger: " + code);
        passed("fencing", "code", code);

        recovered.close();
        reader.close();
        readerClient.deleteLedger(ledgerId);
        try {
            readerClient.openLedger(ledgerId, DigestType.CRC32C, PASSWORD);
            throw new AssertionError("opened a deleted ledger");
        } catch (BKException.BKNoSuchLedgerExistsException | BKException.BKNoSuchLedgerExistsOnMetadataServerException e) {
            passed("delete", "code", e.getCode());
        }
    }

    private static int codeOf(CompletableFuture<?> future) throws Exception {
        try {
            future.get(WAIT_S, TimeUnit.SECONDS);
            return BKException.Code.OK;
        } catch (ExecutionException error) {
            return ((BKException) error.getCause()).getCode();
        }
    }

    private void refusals(BookKeeper writerClient, BookKeeper readerClient) throws Exception {
        LedgerHandle writer = writerClient.createLedger(3, 2, 2, DigestType.CRC32C, PASSWORD);
        addPipelined(writer, "refusals", 0, 3);
        writer.close();
        try {
            readerClient.openLedger(writer.getId(), DigestType.CRC32C, Support.bytes("wrong"));
            throw new AssertionError("opened with a wrong password");
        } catch (BKException.BKUnauthorizedAccessException error) {
            passed("wrong password", "code", error.getCode());
        }
        LedgerHandle reader = readerClient.openLedger(writer.getId(), DigestType.CRC32C, PASSWORD);
        int code = codeOf(reader.readUnconfirmedAsync(0, 5));
        Support.check(code == BKException.Code.NoSuchEntryException, "read behind the end: " + code);
        passed("read behind the end", "code", code);
        reader.close();
    }

    private void deferredSync(BookKeeper writerClient, BookKeeper readerClient) throws Exception {
        String name = "deferred";
        WriteHandle writer = writerClient.newCreateLedgerOp()
                .withEnsembleSize(3).withWriteQuorumSize(2).withAckQuorumSize(2)
                .withDigestType(org.apache.bookkeeper.client.api.DigestType.CRC32C)
                .withPassword(PASSWORD)
                .withWriteFlags(EnumSet.of(WriteFlag.DEFERRED_SYNC))
                .execute().get(WAIT_S, TimeUnit.SECONDS);
        for (long entryId = 0; entryId < 6; entryId++) {
            writer.append(Support.payload(name, entryId, size(entryId)));
        }
        Support.check(writer.getLastAddConfirmed() == -1, "LAC before force: " + writer.getLastAddConfirmed());
        writer.force().get(WAIT_S, TimeUnit.SECONDS);
        Support.check(writer.getLastAddConfirmed() == 5, "LAC after force: " + writer.getLastAddConfirmed());
        writer.close();
        LedgerHandle reader = readerClient.openLedger(writer.getId(), DigestType.CRC32C, PASSWORD);
        checkEntries(reader, name, 5);
        reader.close();
        passed("deferred sync and force", "ledgerId", writer.getId());
    }
}
