import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.bookkeeper.client.LedgerMetadataBuilder;
import org.apache.bookkeeper.client.api.DigestType;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.meta.LedgerMetadataSerDe;
import org.apache.bookkeeper.net.BookieId;

/** Prints ledger metadata as Apache serializes it, a JSON line for each format version (1, 2, 3), digest type and state. */
public final class MetadataBytes {
    private MetadataBytes() {}

    public static void main(String[] arguments) throws Exception {
        List<BookieId> first = List.of(BookieId.parse("127.0.0.1:3181"), BookieId.parse("bookie-2.example:3181"));
        List<BookieId> second = List.of(BookieId.parse("127.0.0.1:3181"), BookieId.parse("f3a6d0e2-bookie"));
        for (int version : new int[] {1, 2, 3}) {
            for (DigestType digestType : DigestType.values()) {
                for (LedgerMetadata.State state : LedgerMetadata.State.values()) {
                    LedgerMetadataBuilder builder = LedgerMetadataBuilder.create()
                            .withId(77).withMetadataFormatVersion(version)
                            .withEnsembleSize(2).withWriteQuorumSize(2).withAckQuorumSize(1)
                            .withDigestType(digestType).withPassword(new byte[] {0, 1, -1, 'p', 'w'})
                            .newEnsembleEntry(0, first).newEnsembleEntry(1000, second)
                            .withCreationTime(1700000000123L);
                    if (state == LedgerMetadata.State.CLOSED) {
                        builder.withClosedState().withLastEntryId(4_000_000_000L).withLength(1L << 40);
                    } else if (state == LedgerMetadata.State.IN_RECOVERY) {
                        builder.withInRecoveryState();
                    }
                    if (version > 1) {
                        builder.withCustomMetadata(Map.of("application", new byte[] {'p', 'u', 'l', 's', 'a', 'r', 0, -1}));
                    }
                    if (version > 2) {
                        builder.storingCreationTime(digestType == DigestType.CRC32C);
                    }
                    LedgerMetadata metadata = builder.build();
                    Map<String, Object> line = new LinkedHashMap<>();
                    line.put("formatVersion", version);
                    line.put("digestType", digestType.toString());
                    line.put("state", state.toString());
                    line.put("bytes", Support.base64(new LedgerMetadataSerDe().serialize(metadata)));
                    line.put("readBack", describe(new LedgerMetadataSerDe().parseConfig(
                            new LedgerMetadataSerDe().serialize(metadata), 77, java.util.Optional.empty())));
                    Support.print(line);
                }
            }
        }
        System.exit(0);
    }

    private static Map<String, Object> describe(LedgerMetadata metadata) {
        Map<String, Object> object = new LinkedHashMap<>();
        object.put("state", metadata.getState().toString());
        object.put("ensembleSize", metadata.getEnsembleSize());
        object.put("writeQuorumSize", metadata.getWriteQuorumSize());
        object.put("ackQuorumSize", metadata.getAckQuorumSize());
        object.put("length", metadata.getLength());
        object.put("lastEntryId", metadata.getLastEntryId());
        object.put("digestType", metadata.hasPassword() ? metadata.getDigestType().toString() : null);
        object.put("password", metadata.hasPassword() ? Support.base64(metadata.getPassword()) : null);
        object.put("ctimeMs", metadata.getCtime());
        Map<String, Object> custom = new LinkedHashMap<>();
        metadata.getCustomMetadata().forEach((key, value) -> custom.put(key, Support.base64(value)));
        object.put("customMetadata", custom);
        Map<String, Object> ensembles = new LinkedHashMap<>();
        metadata.getAllEnsembles().forEach((entryId, bookies) ->
                ensembles.put(Long.toString(entryId), bookies.stream().map(Object::toString).toArray()));
        object.put("ensembles", ensembles);
        return object;
    }
}
