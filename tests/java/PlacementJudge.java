import io.netty.util.HashedWheelTimer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.apache.bookkeeper.client.BKException.BKNotEnoughBookiesException;
import org.apache.bookkeeper.client.EnsemblePlacementPolicy;
import org.apache.bookkeeper.client.EnsemblePlacementPolicy.PlacementPolicyAdherence;
import org.apache.bookkeeper.client.EnsemblePlacementPolicy.PlacementResult;
import org.apache.bookkeeper.common.util.ReflectionUtils;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.feature.SettableFeatureProvider;
import org.apache.bookkeeper.net.AbstractDNSToSwitchMapping;
import org.apache.bookkeeper.net.BookieId;
import org.apache.bookkeeper.net.BookieSocketAddress;
import org.apache.bookkeeper.stats.NullStatsLogger;

/**
 * Judges ensembles by Apache's policies. Each line of the file is a case: racks of all bookies (`host:port=/rack,…`, an empty
 * rack for none), write quorum, ack quorum, settings (`name=value&…`, ensemblePlacementPolicy among them), and the ensemble
 * (`host:port,…`). Prints a JSON line for each: the ensemble's adherence, the best one of Apache's own choices with its
 * bookies, and whether Apache's policy can mend the ensemble.
 */
public final class PlacementJudge {
    private static final int ATTEMPTS = 10;

    private PlacementJudge() {}

    /** The racks of one case, by host; a host without one is in the default rack. */
    private static final class Racks extends AbstractDNSToSwitchMapping {
        private final Map<String, String> racks = new HashMap<>();

        @Override
        public List<String> resolve(List<String> names) {
            List<String> found = new ArrayList<>();
            names.forEach(name -> found.add(racks.get(name.split(":")[0])));
            return found;
        }

        @Override
        public void reloadCachedMappings() {}

        @Override
        public boolean useHostName() {
            return true;
        }
    }

    public static void main(String[] arguments) throws Exception {
        HashedWheelTimer timer = new HashedWheelTimer();
        for (String line : Files.readAllLines(Path.of(arguments[0]))) {
            String[] fields = line.split(" ");
            Racks racks = new Racks();
            HashSet<BookieId> bookies = new HashSet<>();
            for (String each : fields[0].split(",")) {
                String[] parts = each.split("=", 2);
                bookies.add(BookieId.parse(parts[0]));
                racks.racks.put(parts[0].split(":")[0], parts[1].isEmpty() ? null : parts[1]);
            }
            int writeQuorum = Integer.parseInt(fields[1]);
            List<BookieId> ensemble = new ArrayList<>();
            for (String each : fields[4].split(",")) {
                ensemble.add(BookieId.parse(each));
            }
            ClientConfiguration conf = new ClientConfiguration();
            for (String each : fields[3].split("&")) {
                String[] parts = each.split("=", 2);
                conf.setProperty(parts[0], parts[1]);
            }
            int ackQuorum = Integer.parseInt(fields[2]);
            EnsemblePlacementPolicy policy = ReflectionUtils.newInstance(conf.getEnsemblePlacementPolicy());
            policy.initialize(conf, Optional.of(racks), timer, SettableFeatureProvider.DISABLE_ALL,
                    NullStatsLogger.INSTANCE, BookieSocketAddress.LEGACY_BOOKIEID_RESOLVER);
            policy.onClusterChanged(bookies, new HashSet<>());
            Map<String, Object> answer = new LinkedHashMap<>();
            answer.put("adherence", policy.isEnsembleAdheringToPlacementPolicy(ensemble, writeQuorum, ackQuorum).toString());
            PlacementResult<List<BookieId>> best = best(policy, ensemble.size(), writeQuorum, ackQuorum);
            answer.put("apache", best == null ? "NONE" : best.getAdheringToPolicy().toString());
            answer.put("chosen", best == null ? List.of() : best.getResult().stream().map(BookieId::toString).toList());
            try {
                answer.put("mended", policy.replaceToAdherePlacementPolicy(
                        ensemble.size(), writeQuorum, ackQuorum, new HashSet<>(), ensemble).getAdheringToPolicy().toString());
            } catch (UnsupportedOperationException error) {
                answer.put("mended", "NONE");
            }
            Support.print(answer);
            policy.uninitalize();
        }
        timer.stop();
        System.exit(0);
    }

    private static PlacementResult<List<BookieId>> best(EnsemblePlacementPolicy policy, int size, int writeQuorum, int ackQuorum) {
        PlacementResult<List<BookieId>> found = null;
        for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
            try {
                found = policy.newEnsemble(size, writeQuorum, ackQuorum, Map.of(), new HashSet<>());
                if (found.getAdheringToPolicy() == PlacementPolicyAdherence.MEETS_STRICT) {
                    return found;
                }
            } catch (BKNotEnoughBookiesException | IllegalArgumentException error) {
                // Another attempt may end elsewhere; a shape that the policy refuses ends nowhere.
            }
        }
        return found;
    }
}
