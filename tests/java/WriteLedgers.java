import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.Enumeration;
import java.util.EnumSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import org.apache.bookkeeper.client.AsyncCallback.AddCallback;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.LedgerEntry;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.api.WriteFlag;
import org.apache.bookkeeper.client.api.WriteHandle;
import org.apache.bookkeeper.conf.ClientConfiguration;

/**
 * Writes known ledgers and prints, a JSON object a line, what a reader must find.
 *
 * <p>WriteLedgers METADATA-URI v2|v3 [SALT] [ensemble-change] [small]. The salt (0 … 1000) keeps the chosen ledger ids of
 * runs on one cluster apart. With `ensemble-change` the program prints {"stop": BOOKIE-ID}, waits for a line on stdin (that
 * bookie is down now) and goes on writing. With `small` no entry is larger than 1 KiB.
 *
 * <p>Each object: name, protocol, the ledger's metadata (as it is in the store at the end), lastAddConfirmed (what a v2
 * reader learns without recovery), explicitLac (what READ_LAC, and so a v3 reader, knows instead; null without one), deleted,
 * and entries {entryId, size, length (ledger length so far), sha256, lastAddConfirmed (null where it depends on timing)}.
 */
public final class WriteLedgers {
    private static final int[] SIZES = {0, 1, 2, 15, 16, 17, 100, 472, 511, 512, 513, 1024, 4095, 8192, 65536, 100_000, 5};

    private final String metadataUri;
    private final boolean v2;
    private final String protocol;
    private final int salt;
    private final boolean small;
    private final BookKeeper client;

    private WriteLedgers(String metadataUri, String protocol, int salt, boolean small) throws Exception {
        this.metadataUri = metadataUri;
        this.protocol = protocol;
        this.v2 = Support.isV2(protocol);
        this.salt = salt;
        this.small = small;
        this.client = Support.connect(metadataUri, v2);
    }

    public static void main(String[] arguments) {
        Support.main(() -> {
            int salt = arguments.length > 2 ? Integer.parseInt(arguments[2]) : 0;
            List<String> options = arguments.length > 3 ? List.of(arguments).subList(3, arguments.length) : List.of();
            WriteLedgers program = new WriteLedgers(arguments[0], arguments[1], salt, options.contains("small"));
            program.write(options.contains("ensemble-change"));
            Support.abandon(program.client);
        });
    }

    private void write(boolean ensembleChange) throws Exception {
        for (DigestType digestType : DigestType.values()) {
            String password = digestType == DigestType.CRC32C ? "" : "secret of " + digestType;
            Writer writer = new Writer("closed-" + digestType, create(client, 3, 2, 2, digestType, password, Map.of()));
            for (int size : SIZES) {
                if (!small || size <= 1024) {
                    writer.add(size);
                }
            }
            writer.close();
        }

        Writer wide = new Writer("write-quorum-3", create(client, 3, 3, 2, DigestType.CRC32C, "pw", Map.of()));
        wide.addAll(20, 300);
        wide.close();

        Writer single = new Writer("one-bookie", create(client, 1, 1, 1, DigestType.CRC32, "pw", Map.of()));
        single.addAll(5, 64);
        single.close();

        Writer many = new Writer("many-entries", create(client, 3, 2, 2, DigestType.CRC32C, "", Map.of()));
        many.addPipelined(small ? 1100 : 2500, small ? 3 : 40);
        many.close();

        new Writer("empty", create(client, 3, 2, 2, DigestType.CRC32, "", Map.of())).close();

        Map<String, byte[]> custom = new LinkedHashMap<>();
        custom.put("application", Support.bytes("pulsar"));
        custom.put("component", Support.bytes("managed-ledger"));
        custom.put("pulsar/managed-ledger", Support.bytes("tenant/namespace/persistent/täglich"));
        custom.put("binary", new byte[] {0, -1, 10, 127, -128});
        custom.put("nothing", new byte[0]);
        Writer described = new Writer("custom-metadata", create(client, 3, 2, 2, DigestType.MAC, "pä$$", custom));
        described.addAll(3, 10);
        described.close();

        long step = salt * 2L + (v2 ? 1 : 0);
        withId("id-below-2^31", 1_000_000_000L + step);
        withId("id-above-2^31", (1L << 31) + 5 + step);
        withId("id-near-2^63", Long.MAX_VALUE - step);

        writeOpen("open", false);
        writeOpen("recovered", true);

        if (!v2) {
            writeExplicitLac();
            writeDeferredSync();
        }

        Writer deleted = new Writer("deleted", create(client, 3, 2, 2, DigestType.CRC32C, "", Map.of()));
        deleted.addAll(2, 10);
        deleted.handle.close();
        Map<String, Object> object = deleted.object(deleted.handle, deleted.lastEntryId());
        client.deleteLedger(deleted.handle.getId());
        object.put("deleted", true);
        Support.print(object);

        if (ensembleChange) {
            writeEnsembleChange();
        }
    }

    private LedgerHandle create(
            BookKeeper owner, int ensemble, int write, int ack, DigestType digestType, String password,
            Map<String, byte[]> custom) throws Exception {
        return owner.createLedger(ensemble, write, ack, digestType, Support.bytes(password), custom);
    }

    /** A ledger of a chosen id, its entries sent in another order than their ids. */
    private void withId(String name, long ledgerId) throws Exception {
        LedgerHandle handle =
                client.createLedgerAdv(ledgerId, 3, 2, 2, DigestType.CRC32C, Support.bytes("pw"), Map.of());
        Writer writer = new Writer(name, handle);
        List<byte[]> payloads = new ArrayList<>();
        for (int entryId = 0; entryId < 8; entryId++) {
            payloads.add(Support.payload(name, entryId, 50 + entryId));
        }
        List<CompletableFuture<Void>> added = new ArrayList<>();
        for (int entryId : new int[] {1, 0, 2, 5, 4, 3, 7, 6}) {
            CompletableFuture<Void> future = new CompletableFuture<>();
            added.add(future);
            handle.asyncAddEntry(entryId, payloads.get(entryId), 0, payloads.get(entryId).length, callback(future), null);
        }
        for (CompletableFuture<Void> future : added) {
            future.get();
        }
        for (byte[] payload : payloads) {
            writer.record(payload, null);
        }
        // Lengths were counted in the order of sending, so only the last is what an in-order writer would store.
        writer.lengthsKnown = false;
        writer.close();
    }

    /** The writer goes away without closing the ledger; `recover`: a second client closes it. */
    private void writeOpen(String name, boolean recover) throws Exception {
        BookKeeper owner = Support.connect(metadataUri, v2);
        Writer writer = new Writer(name, create(owner, 3, 2, 2, DigestType.CRC32C, "pw", Map.of()));
        writer.addAll(12, 200);
        long ledgerId = writer.handle.getId();
        Support.abandon(owner);
        LedgerHandle reader = recover
                ? client.openLedger(ledgerId, DigestType.CRC32C, Support.bytes("pw"))
                : client.openLedgerNoRecovery(ledgerId, DigestType.CRC32C, Support.bytes("pw"));
        long expected = recover ? writer.lastEntryId() : writer.lastEntryId() - 1;
        Support.check(reader.getLastAddConfirmed() == expected, name + ": LAC " + reader.getLastAddConfirmed());
        Support.print(writer.object(reader, expected));
        reader.close();
    }

    /** An open ledger whose last entry is confirmed by an explicit LAC only. */
    private void writeExplicitLac() throws Exception {
        ClientConfiguration configuration = Support.configuration(metadataUri, false);
        configuration.setExplictLacInterval(50);
        BookKeeper owner = new BookKeeper(configuration);
        Writer writer = new Writer("open-explicit-lac", create(owner, 3, 2, 2, DigestType.MAC, "pw", Map.of()));
        writer.addAll(4, 30);
        long ledgerId = writer.handle.getId();
        LedgerHandle reader = client.openLedgerNoRecovery(ledgerId, DigestType.MAC, Support.bytes("pw"));
        for (int attempt = 0; reader.readExplicitLastConfirmed() < writer.lastEntryId(); attempt++) {
            Support.check(attempt < 200, "no explicit LAC");
            Thread.sleep(50);
        }
        Support.abandon(owner);
        writer.explicitLac = writer.lastEntryId();
        Support.print(writer.object(reader, writer.lastEntryId() - 1));
        reader.close();
    }

    /** Acknowledged before they are synced; the LAC follows force(). */
    private void writeDeferredSync() throws Exception {
        String name = "deferred-sync";
        WriteHandle handle = client.newCreateLedgerOp()
                .withEnsembleSize(3).withWriteQuorumSize(2).withAckQuorumSize(2)
                .withDigestType(org.apache.bookkeeper.client.api.DigestType.CRC32C)
                .withPassword(Support.bytes("pw"))
                .withWriteFlags(EnumSet.of(WriteFlag.DEFERRED_SYNC))
                .execute().get();
        Writer writer = new Writer(name, (LedgerHandle) handle);
        for (int entryId = 0; entryId < 6; entryId++) {
            byte[] payload = Support.payload(name, entryId, 90);
            handle.append(payload);
            writer.record(payload, -1L);
        }
        handle.force().get();
        Support.check(handle.getLastAddConfirmed() == 5, "LAC after force: " + handle.getLastAddConfirmed());
        writer.close();
    }

    private void writeEnsembleChange() throws Exception {
        Writer writer = new Writer("ensemble-change", create(client, 2, 2, 2, DigestType.CRC32C, "pw", Map.of()));
        writer.addAll(5, 100);
        String bookie = writer.handle.getLedgerMetadata().getEnsembleAt(0).get(0).toString();
        Support.print(Map.of("stop", bookie));
        Support.check(new BufferedReader(new InputStreamReader(System.in)).readLine() != null, "no answer on stdin");
        writer.addAll(5, 100);
        int segments = writer.handle.getLedgerMetadata().getAllEnsembles().size();
        Support.check(segments == 2, segments + " ensembles after the stop of " + bookie);
        writer.close();
    }

    private static AddCallback callback(CompletableFuture<Void> future) {
        return (code, handle, entryId, context) -> {
            if (code == BKException.Code.OK) {
                future.complete(null);
            } else {
                future.completeExceptionally(BKException.create(code));
            }
        };
    }

    /** A ledger in the making, and what was written into it. */
    private final class Writer {
        final String name;
        final LedgerHandle handle;
        final List<Map<String, Object>> entries = new ArrayList<>();
        boolean lengthsKnown = true;
        Long explicitLac;
        long length;

        Writer(String name, LedgerHandle handle) {
            this.name = name;
            this.handle = handle;
        }

        long lastEntryId() {
            return entries.size() - 1;
        }

        void record(byte[] payload, Long lastAddConfirmed) throws Exception {
            length += payload.length;
            Map<String, Object> entry = Support.entry(entries.size(), payload, length);
            entry.put("lastAddConfirmed", lastAddConfirmed);
            entries.add(entry);
        }

        void add(int size) throws Exception {
            byte[] payload = Support.payload(name, entries.size(), size);
            long entryId = handle.addEntry(payload);
            Support.check(entryId == entries.size(), "entry " + entryId + " instead of " + entries.size());
            record(payload, entryId - 1);
        }

        void addAll(int count, int size) throws Exception {
            for (int index = 0; index < count; index++) {
                add(size + index);
            }
        }

        void addPipelined(int count, int size) throws Exception {
            List<CompletableFuture<Void>> added = new ArrayList<>();
            for (int index = 0; index < count; index++) {
                byte[] payload = Support.payload(name, entries.size(), size);
                CompletableFuture<Void> future = new CompletableFuture<>();
                added.add(future);
                handle.asyncAddEntry(payload, callback(future), null);
                record(payload, null);
            }
            for (CompletableFuture<Void> future : added) {
                future.get();
            }
        }

        /** Close, and print what a reader must find, after having read it back. */
        void close() throws Exception {
            handle.close();
            LedgerHandle reader =
                    client.openLedger(handle.getId(), digestType(), handle.getLedgerMetadata().getPassword());
            if (!entries.isEmpty()) {
                Enumeration<LedgerEntry> found = reader.readEntries(0, lastEntryId());
                for (Map<String, Object> expected : entries) {
                    LedgerEntry entry = found.nextElement();
                    Support.check(Support.sha256(entry.getEntry()).equals(expected.get("sha256")), name + ": payload");
                    if (lengthsKnown) {
                        Support.check(expected.get("length").equals(entry.getLength()), name + ": length");
                    } else {
                        expected.put("length", entry.getLength());
                    }
                }
            }
            Support.print(object(reader, lastEntryId()));
            reader.close();
        }

        private DigestType digestType() {
            return DigestType.fromApiDigestType(handle.getLedgerMetadata().getDigestType());
        }

        Map<String, Object> object(LedgerHandle from, long lastAddConfirmed) {
            Map<String, Object> object = new LinkedHashMap<>();
            object.put("name", name);
            object.put("protocol", protocol);
            object.putAll(Support.ledger(from, from.getLedgerMetadata()));
            object.put("lastAddConfirmed", lastAddConfirmed);
            object.put("explicitLac", explicitLac);
            object.put("deleted", false);
            object.put("entries", entries);
            return object;
        }
    }
}
