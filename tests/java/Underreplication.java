import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import org.apache.bookkeeper.meta.LedgerAuditorManager;
import org.apache.bookkeeper.meta.LedgerUnderreplicationManager;
import org.apache.bookkeeper.meta.MetadataClientDriver;
import org.apache.bookkeeper.meta.MetadataDrivers;
import org.apache.bookkeeper.meta.UnderreplicatedLedger;
import org.apache.bookkeeper.stats.NullStatsLogger;

/**
 * Apache's own auto-recovery state behind a pipe: Underreplication METADATA-URI, then a command a line on stdin, a JSON line each.
 *
 * <p>mark ID BOOKIE… | get ID | list | poll | release ID | replicated ID | worker ID | status | enable | disable | delay [S] |
 * clocks [MS MS MS] | vote BOOKIE | auditor
 */
public final class Underreplication {
    private Underreplication() {}

    public static void main(String[] arguments) {
        Support.main(() -> run(arguments));
    }

    private static void run(String[] arguments) throws Exception {
        ScheduledExecutorService scheduler = Executors.newSingleThreadScheduledExecutor();
        MetadataClientDriver driver = MetadataDrivers.getClientDriver(URI.create(arguments[0]));
        driver.initialize(
                Support.configuration(arguments[0], false), scheduler, NullStatsLogger.INSTANCE, Optional.empty());
        LedgerUnderreplicationManager manager = driver.getLedgerManagerFactory().newLedgerUnderreplicationManager();
        LedgerAuditorManager auditors = driver.getLedgerManagerFactory().newLedgerAuditorManager();
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            Map<String, Object> answer = new LinkedHashMap<>();
            try {
                answer(line.split(" "), manager, auditors, answer);
            } catch (Exception error) {
                answer.put("error", error.toString());
            }
            Support.print(answer);
        }
        System.exit(0);
    }

    private static void answer(
            String[] words, LedgerUnderreplicationManager manager, LedgerAuditorManager auditors,
            Map<String, Object> answer) throws Exception {
        long id = words.length > 1 && words[1].matches("\\d+") ? Long.parseLong(words[1]) : -1;
        switch (words[0]) {
            case "mark":
                manager.markLedgerUnderreplicatedAsync(id, Arrays.asList(words).subList(2, words.length)).get();
                break;
            case "get":
                show(manager.getLedgerUnreplicationInfo(id), answer);
                break;
            case "list":
                Iterator<UnderreplicatedLedger> found = manager.listLedgersToRereplicate(null);
                while (found.hasNext()) {
                    UnderreplicatedLedger each = found.next();
                    answer.put(Long.toString(each.getLedgerId()), each.getReplicaList());
                }
                break;
            case "poll":
                answer.put("ledgerId", Long.toString(manager.pollLedgerToRereplicate()));
                break;
            case "release":
                manager.releaseUnderreplicatedLedger(id);
                break;
            case "replicated":
                manager.markLedgerReplicated(id);
                break;
            case "worker":
                answer.put("worker", manager.getReplicationWorkerIdRereplicatingLedger(id));
                answer.put("locked", manager.isLedgerBeingReplicated(id));
                break;
            case "status":
                answer.put("enabled", manager.isLedgerReplicationEnabled());
                break;
            case "enable":
                manager.enableLedgerReplication();
                break;
            case "disable":
                manager.disableLedgerReplication();
                break;
            case "delay":
                if (id >= 0) {
                    manager.setLostBookieRecoveryDelay((int) id);
                }
                answer.put("delay", manager.getLostBookieRecoveryDelay());
                break;
            case "clocks":
                if (id >= 0) {
                    manager.setCheckAllLedgersCTime(id);
                    manager.setPlacementPolicyCheckCTime(Long.parseLong(words[2]));
                    manager.setReplicasCheckCTime(Long.parseLong(words[3]));
                }
                answer.put("clocks", Arrays.asList(
                        manager.getCheckAllLedgersCTime(), manager.getPlacementPolicyCheckCTime(),
                        manager.getReplicasCheckCTime()));
                break;
            case "vote":
                auditors.tryToBecomeAuditor(words[1], event -> { });
                break;
            case "auditor":
                answer.put("auditor", String.valueOf(auditors.getCurrentAuditor()));
                break;
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    private static void show(UnderreplicatedLedger found, Map<String, Object> answer) {
        if (found != null) {
            answer.put("replicas", found.getReplicaList());
            answer.put("ctime", found.getCtime());
        }
    }
}
