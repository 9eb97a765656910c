import com.fasterxml.jackson.databind.ObjectMapper;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Random;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.DefaultEnsemblePlacementPolicy;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.conf.ClientConfiguration;

/** What the test programs share: client settings, payloads, JSON lines. */
final class Support {
    private static final ObjectMapper JSON = new ObjectMapper();

    private Support() {}

    static ClientConfiguration configuration(String metadataUri, boolean v2) {
        ClientConfiguration configuration = new ClientConfiguration();
        configuration.setMetadataServiceUri(metadataUri);
        configuration.setUseV2WireProtocol(v2);
        configuration.setZkTimeout(60000);
        configuration.setAddEntryTimeout(120);
        configuration.setReadEntryTimeout(120);
        configuration.setThrottleValue(0);
        configuration.setNumWorkerThreads(2);
        configuration.setNumIOThreads(1);
        configuration.setEnsemblePlacementPolicy(DefaultEnsemblePlacementPolicy.class);
        return configuration;
    }

    static BookKeeper connect(String metadataUri, boolean v2) throws Exception {
        return new BookKeeper(configuration(metadataUri, v2));
    }

    /** "v2" or "v3". */
    static boolean isV2(String protocol) {
        if (!protocol.equals("v2") && !protocol.equals("v3")) {
            throw new IllegalArgumentException("protocol is v2 or v3, not " + protocol);
        }
        return protocol.equals("v2");
    }

    /** The same bytes for the same name and entry, in every run. */
    static byte[] payload(String name, long entryId, int size) {
        byte[] bytes = new byte[size];
        new Random(name.hashCode() * 1_000_003L + entryId).nextBytes(bytes);
        return bytes;
    }

    static String sha256(byte[] bytes) throws Exception {
        StringBuilder text = new StringBuilder();
        for (byte b : MessageDigest.getInstance("SHA-256").digest(bytes)) {
            text.append(String.format("%02x", b));
        }
        return text.toString();
    }

    static String base64(byte[] bytes) {
        return Base64.getEncoder().encodeToString(bytes);
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static Map<String, Object> entry(long entryId, byte[] payload, long length) throws Exception {
        Map<String, Object> entry = new LinkedHashMap<>();
        entry.put("entryId", entryId);
        entry.put("size", payload.length);
        entry.put("length", length);
        entry.put("sha256", sha256(payload));
        return entry;
    }

    /** The metadata part of a ledger's JSON object. */
    static Map<String, Object> ledger(LedgerHandle handle, LedgerMetadata metadata) {
        Map<String, Object> object = new LinkedHashMap<>();
        object.put("ledgerId", Long.toString(handle.getId()));
        object.put("state", metadata.getState().toString());
        object.put("ensembleSize", metadata.getEnsembleSize());
        object.put("writeQuorumSize", metadata.getWriteQuorumSize());
        object.put("ackQuorumSize", metadata.getAckQuorumSize());
        object.put("digestType", metadata.hasPassword() ? metadata.getDigestType().toString() : null);
        object.put("password", metadata.hasPassword() ? base64(metadata.getPassword()) : null);
        object.put("metadataFormatVersion", metadata.getMetadataFormatVersion());
        object.put("length", metadata.getLength());
        object.put("lastEntryId", metadata.getLastEntryId());
        object.put("ctimeMs", metadata.getCtime());
        Map<String, Object> custom = new LinkedHashMap<>();
        metadata.getCustomMetadata().forEach((key, value) -> custom.put(key, base64(value)));
        object.put("customMetadata", custom);
        Map<String, Object> ensembles = new LinkedHashMap<>();
        metadata.getAllEnsembles().forEach((first, bookies) ->
                ensembles.put(Long.toString(first), bookies.stream().map(Object::toString).toArray()));
        object.put("ensembles", ensembles);
        return object;
    }

    static synchronized void print(Map<String, ?> object) throws Exception {
        System.out.println(JSON.writeValueAsString(object));
        System.out.flush();
    }

    /** A program's body. */
    interface Body {
        void run() throws Exception;
    }

    /** Run a program and end the JVM: 0, or 1 with the reason on stderr, whatever threads the client leaves behind. */
    static void main(Body body) {
        try {
            body.run();
        } catch (Exception | AssertionError error) {
            error.printStackTrace();
            System.exit(1);
        }
        System.exit(0);
    }

    /** Close a client that has a ledger open: its writer is gone. */
    static void abandon(BookKeeper client) throws Exception {
        try {
            client.close();
        } catch (NullPointerException error) {
            // Until 4.17 close() can meet an answer that is on its way (CompletionValue.errorOutAndRunCallback).
            System.err.println("close: " + error.getMessage());
        }
    }

    static void check(boolean condition, String what) {
        if (!condition) {
            throw new AssertionError(what);
        }
    }
}
