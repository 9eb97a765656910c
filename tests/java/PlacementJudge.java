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
import org.apache.bookkeeper.client.EnsemblePlacementPolicy.PlacementPolicyAdherence;
import org.apache.bookkeeper.client.RackawareEnsemblePlacementPolicy;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.feature.SettableFeatureProvider;
import org.apache.bookkeeper.net.AbstractDNSToSwitchMapping;
import org.apache.bookkeeper.net.BookieId;
import org.apache.bookkeeper.net.BookieSocketAddress;
import org.apache.bookkeeper.stats.NullStatsLogger;

/**
 * Judges ensembles by Apache's rack-aware policy. Each line of the file is a case: racks of all bookies
 * (`host:port=/rack,…`, an empty rack for none), write quorum, minNumRacksPerWriteQuorum, whether it is enforced, and the
 * ensemble (`host:port,…`). Prints a JSON line for each: the ensemble's adherence, the best one of Apache's own choices, and
 * whether Apache's policy can mend the ensemble.
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
            conf.setMinNumRacksPerWriteQuorum(Integer.parseInt(fields[2]));
            conf.setEnforceMinNumRacksPerWriteQuorum(Boolean.parseBoolean(fields[3]));
            RackawareEnsemblePlacementPolicy policy = new RackawareEnsemblePlacementPolicy();
            policy.initialize(conf, Optional.of(racks), timer, SettableFeatureProvider.DISABLE_ALL,
                    NullStatsLogger.INSTANCE, BookieSocketAddress.LEGACY_BOOKIEID_RESOLVER);
            policy.onClusterChanged(bookies, new HashSet<>());
            Map<String, Object> answer = new LinkedHashMap<>();
            answer.put("adherence", policy.isEnsembleAdheringToPlacementPolicy(ensemble, writeQuorum, writeQuorum).toString());
            answer.put("apache", best(policy, ensemble.size(), writeQuorum));
            answer.put("mended", policy.replaceToAdherePlacementPolicy(
                    ensemble.size(), writeQuorum, writeQuorum, new HashSet<>(), ensemble).getAdheringToPolicy().toString());
            Support.print(answer);
            policy.uninitalize();
        }
        timer.stop();
        System.exit(0);
    }

    private static String best(RackawareEnsemblePlacementPolicy policy, int size, int writeQuorum) {
        String found = "NONE";
        for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
            try {
                PlacementPolicyAdherence adherence = policy.newEnsemble(size, writeQuorum, writeQuorum, Map.of(), new HashSet<>())
                        .getAdheringToPolicy();
                found = adherence.toString();
                if (adherence == PlacementPolicyAdherence.MEETS_STRICT) {
                    return found;
                }
            } catch (BKNotEnoughBookiesException error) {
                // Another attempt may end elsewhere.
            }
        }
        return found;
    }
}
