import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.stream.Collectors;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.LedgerMetadataBuilder;
import org.apache.bookkeeper.client.api.DigestType;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.discover.RegistrationClient;
import org.apache.bookkeeper.meta.LedgerIdGenerator;
import org.apache.bookkeeper.meta.LedgerManager;
import org.apache.bookkeeper.meta.MetadataClientDriver;
import org.apache.bookkeeper.meta.MetadataDrivers;
import org.apache.bookkeeper.net.BookieId;
import org.apache.bookkeeper.stats.NullStatsLogger;
import org.apache.bookkeeper.versioning.LongVersion;
import org.apache.bookkeeper.versioning.Version;
import org.apache.bookkeeper.versioning.Versioned;

/**
 * Apache's own metadata classes behind a pipe: LedgerMetadataStore METADATA-URI, then a command a line on stdin, a JSON line each.
 *
 * <p>id | create ID | read ID | close ID VERSION | remove ID | list | bookies | write TEXT (a closed ledger of one entry on one
 * bookie, by Apache's client) | health [true|false] (may clients quarantine bookies?)
 */
public final class LedgerMetadataStore {
    private LedgerMetadataStore() {}

    public static void main(String[] arguments) {
        Support.main(() -> run(arguments));
    }

    private static void run(String[] arguments) throws Exception {
        ScheduledExecutorService scheduler = Executors.newSingleThreadScheduledExecutor();
        MetadataClientDriver driver = MetadataDrivers.getClientDriver(URI.create(arguments[0]));
        driver.initialize(
                Support.configuration(arguments[0], false), scheduler, NullStatsLogger.INSTANCE, Optional.empty());
        LedgerManager manager = driver.getLedgerManagerFactory().newLedgerManager();
        LedgerIdGenerator generator = driver.getLedgerManagerFactory().newLedgerIdGenerator();
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            Map<String, Object> answer = new LinkedHashMap<>();
            try {
                answer(arguments[0], line.split(" "), manager, generator, driver, answer);
            } catch (Exception error) {
                Throwable cause = error.getCause() == null ? error : error.getCause();
                answer.put("error", BKException.getExceptionCode(cause));
            }
            Support.print(answer);
        }
        System.exit(0);
    }

    private static void answer(
            String metadataUri, String[] words, LedgerManager manager, LedgerIdGenerator generator,
            MetadataClientDriver driver, Map<String, Object> answer) throws Exception {
        RegistrationClient registration = driver.getRegistrationClient();
        long id = words.length > 1 && words[1].matches("\\d+") ? Long.parseLong(words[1]) : -1;
        switch (words[0]) {
            case "id":
                CompletableFuture<Long> made = new CompletableFuture<>();
                generator.generateLedgerId((code, result) -> {
                    if (code == BKException.Code.OK) {
                        made.complete(result);
                    } else {
                        made.completeExceptionally(BKException.create(code));
                    }
                });
                answer.put("ledgerId", Long.toString(made.get()));
                break;
            case "create":
                show(manager.createLedgerMetadata(id, open(id)).get(), answer);
                break;
            case "read":
                show(manager.readLedgerMetadata(id).get(), answer);
                break;
            case "close":
                LedgerMetadata closed = LedgerMetadataBuilder.from(manager.readLedgerMetadata(id).get().getValue())
                        .withClosedState().withLastEntryId(7).withLength(70).build();
                show(manager.writeLedgerMetadata(id, closed, new LongVersion(Long.parseLong(words[2]))).get(), answer);
                break;
            case "remove":
                manager.removeLedgerMetadata(id, Version.ANY).get();
                break;
            case "list":
                List<String> ids = new ArrayList<>();
                LedgerManager.LedgerRangeIterator ranges = manager.getLedgerRanges(10_000);
                while (ranges.hasNext()) {
                    for (Long each : ranges.next().getLedgers()) {
                        ids.add(Long.toString(each));
                    }
                }
                answer.put("ledgerIds", ids);
                break;
            case "bookies":
                answer.put("rw", names(registration.getWritableBookies().get().getValue()));
                answer.put("ro", names(registration.getReadOnlyBookies().get().getValue()));
                Map<String, Object> endpoints = new LinkedHashMap<>();
                for (BookieId bookie : registration.getWritableBookies().get().getValue()) {
                    endpoints.put(bookie.toString(), registration.getBookieServiceInfo(bookie).get().getValue()
                            .getEndpoints().stream()
                            .map(each -> each.getProtocol() + "://" + each.getHost() + ":" + each.getPort())
                            .collect(Collectors.toList()));
                }
                answer.put("endpoints", endpoints);
                break;
            case "write":
                try (BookKeeper client = Support.connect(metadataUri, false);
                        LedgerHandle handle = client.createLedger(
                                1, 1, 1, BookKeeper.DigestType.CRC32C, Support.bytes("secret"))) {
                    handle.addEntry(Support.bytes(words[1]));
                    answer.put("ledgerId", Long.toString(handle.getId()));
                }
                break;
            case "health":
                if (words.length > 1) {
                    String method = Boolean.parseBoolean(words[1]) ? "enableHealthCheck" : "disableHealthCheck";
                    ((CompletableFuture<?>) driver.getClass().getMethod(method).invoke(driver)).get();
                }
                answer.put("enabled", driver.isHealthCheckEnabled().get());
                break;
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    private static LedgerMetadata open(long id) {
        List<BookieId> bookies = List.of(BookieId.parse("127.0.0.1:3181"), BookieId.parse("bookie-2"));
        return LedgerMetadataBuilder.create()
                .withId(id).withMetadataFormatVersion(3)
                .withEnsembleSize(2).withWriteQuorumSize(2).withAckQuorumSize(1)
                .withDigestType(DigestType.CRC32C).withPassword(Support.bytes("secret"))
                .newEnsembleEntry(0, bookies).build();
    }

    private static void show(Versioned<LedgerMetadata> found, Map<String, Object> answer) {
        answer.put("version", ((LongVersion) found.getVersion()).getLongVersion());
        answer.put("state", found.getValue().getState().toString());
        answer.put("ctime", found.getValue().getCtime());
        answer.put("bookies", names(found.getValue().getEnsembleAt(0)));
    }

    private static List<String> names(Iterable<BookieId> bookies) {
        List<String> names = new ArrayList<>();
        bookies.forEach(each -> names.add(each.toString()));
        names.sort(null);
        return names;
    }
}
