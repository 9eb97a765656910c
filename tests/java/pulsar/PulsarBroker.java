package org.apache.pulsar.broker;

import io.netty.buffer.Unpooled;
import io.netty.channel.EventLoopGroup;
import java.io.BufferedReader;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.bookkeeper.client.AsyncCallback;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.EnsemblePlacementPolicy;
import org.apache.bookkeeper.client.api.LastConfirmedAndEntry;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.client.impl.LedgerEntriesImpl;
import org.apache.bookkeeper.client.impl.LedgerEntryImpl;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.mledger.LedgerOffloader;
import org.apache.bookkeeper.mledger.offload.OffloadUtils;
import org.apache.bookkeeper.stats.StatsLogger;
import org.apache.pulsar.client.admin.LongRunningProcessStatus;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.common.naming.NamespaceName;
import org.apache.pulsar.common.policies.data.ClusterData;
import org.apache.pulsar.common.policies.data.OffloadPolicies;
import org.apache.pulsar.common.policies.data.OffloadPoliciesImpl;
import org.apache.pulsar.common.policies.data.PersistentTopicInternalStats;
import org.apache.pulsar.common.policies.data.TenantInfo;
import org.apache.pulsar.metadata.api.extended.MetadataStoreExtended;

/**
 * A broker in this process, which answers each line on stdin by a line of JSON: `produce TOPIC COUNT`, `ledgers TOPIC` …
 * Arguments: metadata store's URL, the bookies' metadata URI, the compression of topics' and cursors' metadata,
 * after how many seconds cursors write positions that they kept in memory, and the directory that `offload` fills.
 * `arm create` lets it die once its next ledger exists, before it names it; `arm delete` before its next deletion of a
 * ledger; `arm offload` once its next ledger is copied, before the topic knows.
 */
public class PulsarBroker {
    private static volatile String armed = "";

    private static void dieIfArmed(String step, String word, long ledger) {
        if (armed.equals(step)) {
            System.out.println("{\"" + word + "\": " + ledger + "}");
            System.out.flush();
            Runtime.getRuntime().halt(9);
        }
    }

    /** Tiered storage in a directory, a file for each ledger; Pulsar's own drivers are not on Maven Central. */
    static class DirectoryOffloader implements LedgerOffloader {
        private final Path directory;
        final OffloadPoliciesImpl policies = new OffloadPoliciesImpl();

        DirectoryOffloader(Path directory) {
            this.directory = directory;
            policies.setManagedLedgerOffloadDriver(getOffloadDriverName());
        }

        @Override
        public String getOffloadDriverName() {
            return "filesystem";
        }

        @Override
        public Map<String, String> getOffloadDriverMetadata() {
            return Map.of("storageBasePath", directory.toString());
        }

        private Path file(long ledger, UUID id) {
            return directory.resolve(ledger + "-" + id);
        }

        @Override
        public CompletableFuture<Void> offload(ReadHandle ledger, UUID id, Map<String, String> metadata) {
            return CompletableFuture.runAsync(() -> {
                Path file = file(ledger.getId(), id);
                try (DataOutputStream out = new DataOutputStream(Files.newOutputStream(file));
                        LedgerEntries entries = ledger.read(0, ledger.getLastAddConfirmed())) {
                    byte[] format = OffloadUtils.buildLedgerMetadataFormat(ledger.getLedgerMetadata());
                    out.writeInt(format.length);
                    out.write(format);
                    for (LedgerEntry entry : entries) {
                        byte[] bytes = entry.getEntryBytes();
                        out.writeInt(bytes.length);
                        out.write(bytes);
                    }
                } catch (Exception error) {
                    throw new RuntimeException(error);
                }
                dieIfArmed("offload", "copied", ledger.getId());
            });
        }

        @Override
        public CompletableFuture<ReadHandle> readOffloaded(long ledger, UUID id, Map<String, String> metadata) {
            return CompletableFuture.supplyAsync(() -> {
                try {
                    return new OffloadedLedger(ledger, file(ledger, id));
                } catch (IOException error) {
                    throw new RuntimeException(error);
                }
            });
        }

        @Override
        public CompletableFuture<Void> deleteOffloaded(long ledger, UUID id, Map<String, String> metadata) {
            return CompletableFuture.runAsync(() -> {
                try {
                    Files.deleteIfExists(file(ledger, id));
                } catch (IOException error) {
                    throw new RuntimeException(error);
                }
            });
        }

        @Override
        public OffloadPolicies getOffloadPolicies() {
            return policies;
        }

        @Override
        public void close() {
        }
    }

    /** A ledger that is read from its file. */
    static class OffloadedLedger implements ReadHandle {
        private final LedgerMetadata metadata;
        private final List<byte[]> entries = new ArrayList<>();

        OffloadedLedger(long ledger, Path file) throws IOException {
            try (DataInputStream in = new DataInputStream(Files.newInputStream(file))) {
                metadata = OffloadUtils.parseLedgerMetadata(ledger, in.readNBytes(in.readInt()));
                while (in.available() > 0) {
                    entries.add(in.readNBytes(in.readInt()));
                }
            }
        }

        @Override
        public long getId() {
            return metadata.getLedgerId();
        }

        @Override
        public LedgerMetadata getLedgerMetadata() {
            return metadata;
        }

        @Override
        public CompletableFuture<Void> closeAsync() {
            return CompletableFuture.completedFuture(null);
        }

        @Override
        public CompletableFuture<LedgerEntries> readAsync(long first, long last) {
            List<LedgerEntry> found = new ArrayList<>();
            for (long entry = first; entry <= last; entry++) {
                byte[] bytes = entries.get((int) entry);
                found.add(LedgerEntryImpl.create(getId(), entry, bytes.length, Unpooled.wrappedBuffer(bytes)));
            }
            return CompletableFuture.completedFuture(LedgerEntriesImpl.create(found));
        }

        @Override
        public CompletableFuture<LedgerEntries> readUnconfirmedAsync(long first, long last) {
            return readAsync(first, last);
        }

        @Override
        public CompletableFuture<Long> readLastAddConfirmedAsync() {
            return CompletableFuture.completedFuture(getLastAddConfirmed());
        }

        @Override
        public CompletableFuture<Long> tryReadLastAddConfirmedAsync() {
            return readLastAddConfirmedAsync();
        }

        @Override
        public long getLastAddConfirmed() {
            return metadata.getLastEntryId();
        }

        @Override
        public long getLength() {
            return metadata.getLength();
        }

        @Override
        public boolean isClosed() {
            return true;
        }

        @Override
        public CompletableFuture<LastConfirmedAndEntry> readLastAddConfirmedAndEntryAsync(long entry, long timeoutMs,
                boolean parallel) {
            return CompletableFuture.failedFuture(new UnsupportedOperationException());
        }
    }

    /** Dies between the two steps of a creation or a deletion. */
    static class DyingBookKeeper extends BookKeeper {
        DyingBookKeeper(ClientConfiguration configuration) throws Exception {
            super(configuration);
        }

        @Override
        public void asyncCreateLedger(int ensemble, int write, int ack, DigestType digest, byte[] password,
                AsyncCallback.CreateCallback callback, Object context, Map<String, byte[]> metadata) {
            String step = armed;
            super.asyncCreateLedger(ensemble, write, ack, digest, password, (code, handle, given) -> {
                if (step.equals("create")) {
                    dieIfArmed("create", "created", handle.getId());
                }
                callback.createComplete(code, handle, given);
            }, context, metadata);
        }

        @Override
        public void asyncDeleteLedger(long ledger, AsyncCallback.DeleteCallback callback, Object context) {
            dieIfArmed("delete", "kept", ledger);
            super.asyncDeleteLedger(ledger, callback, context);
        }
    }

    static class DyingFactory extends BookKeeperClientFactoryImpl {
        @Override
        public CompletableFuture<BookKeeper> create(ServiceConfiguration configuration, MetadataStoreExtended store,
                EventLoopGroup group, Optional<Class<? extends EnsemblePlacementPolicy>> policy,
                Map<String, Object> properties, StatsLogger stats) {
            try {
                ClientConfiguration client = createBkClientConfiguration(store, configuration);
                setDefaultEnsemblePlacementPolicy(client, configuration, store);
                return CompletableFuture.completedFuture(new DyingBookKeeper(client));
            } catch (Exception error) {
                return CompletableFuture.failedFuture(error);
            }
        }
    }

    public static void main(String[] arguments) throws Exception {
        ServiceConfiguration configuration = new ServiceConfiguration();
        configuration.setClusterName("test");
        configuration.setMetadataStoreUrl(arguments[0]);
        configuration.setConfigurationMetadataStoreUrl(arguments[0]);
        configuration.setBookkeeperMetadataServiceUri(arguments[1]);
        configuration.setManagedLedgerInfoCompressionType(arguments[2]);
        configuration.setManagedCursorInfoCompressionType(arguments[2]);
        configuration.setAdvertisedAddress("127.0.0.1");
        configuration.setBindAddress("127.0.0.1");
        configuration.setBrokerServicePort(Optional.of(0));
        configuration.setWebServicePort(Optional.of(0));
        configuration.setManagedLedgerDefaultEnsembleSize(2);
        configuration.setManagedLedgerDefaultWriteQuorum(2);
        configuration.setManagedLedgerDefaultAckQuorum(2);
        configuration.setManagedLedgerMaxEntriesPerLedger(10);
        configuration.setManagedLedgerMinLedgerRolloverTimeMinutes(0);
        configuration.setManagedLedgerMetadataOperationsTimeoutSeconds(60);
        configuration.setManagedLedgerCacheSizeMB(16);
        configuration.setManagedLedgerCursorPositionFlushSeconds(Integer.parseInt(arguments[3]));
        configuration.setDefaultNumberOfNamespaceBundles(1);
        configuration.setLoadBalancerEnabled(false);
        configuration.setNumIOThreads(2);
        configuration.setNumOrderedExecutorThreads(2);
        configuration.setNumHttpServerThreads(8);
        configuration.setBrokerDeleteInactiveTopicsEnabled(false);
        configuration.setForceDeleteNamespaceAllowed(true);
        configuration.setForceDeleteTenantAllowed(true);
        configuration.setBrokerShutdownTimeoutMs(0);
        configuration.setZooKeeperSessionTimeoutMillis(5000);
        configuration.setBacklogQuotaDefaultRetentionPolicy(
                org.apache.pulsar.common.policies.data.BacklogQuota.RetentionPolicy.consumer_backlog_eviction);
        configuration.setDelayedDeliveryTrackerFactoryClassName(
                "org.apache.pulsar.broker.delayed.BucketDelayedDeliveryTrackerFactory");
        configuration.setDelayedDeliveryMinIndexCountPerBucket(10);
        configuration.setDelayedDeliveryTickTimeMillis(100);
        configuration.setDelayedDeliveryMaxTimeStepPerBucketSnapshotSegmentSeconds(1);

        DirectoryOffloader offloader = new DirectoryOffloader(Path.of(arguments.length > 4 ? arguments[4] : "."));
        PulsarService broker = new PulsarService(configuration) {
            @Override
            public BookKeeperClientFactory newBookKeeperClientFactory() {
                return new DyingFactory();
            }

            @Override
            public LedgerOffloader getManagedLedgerOffloader(NamespaceName namespace, OffloadPoliciesImpl policies) {
                return arguments.length > 4 ? offloader : super.getManagedLedgerOffloader(namespace, policies);
            }
        };
        broker.start();
        PulsarAdmin admin = broker.getAdminClient();
        if (!admin.clusters().getClusters().contains("test")) {
            admin.clusters().createCluster("test", ClusterData.builder()
                    .serviceUrl(broker.getWebServiceAddress()).brokerServiceUrl(broker.getBrokerServiceUrl()).build());
            admin.tenants().createTenant("public", TenantInfo.builder().allowedClusters(Set.of("test")).build());
            admin.namespaces().createNamespace("public/default", Set.of("test"));
        }
        PulsarClient client = PulsarClient.builder().serviceUrl(broker.getBrokerServiceUrl()).build();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null;) {
            try {
                System.out.println(answer(admin, client, offloader, line.split(" ")));
            } catch (Throwable error) {
                error.printStackTrace();
                System.out.println("{\"error\": \"" + error.toString().replace('"', '\'').replace('\n', ' ') + "\"}");
            }
            System.out.flush();
        }
        Runtime.getRuntime().halt(0);
    }

    private static String answer(PulsarAdmin admin, PulsarClient client, DirectoryOffloader offloader, String[] words)
            throws Exception {
        String topic = words.length > 1 ? words[1] : "";
        switch (words[0]) {
            case "arm" -> armed = topic;
            case "produce" -> {
                try (Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(false).create()) {
                    for (int number = 0; number < Integer.parseInt(words[2]); number++) {
                        producer.newMessage().key("k" + number % 3).value(new byte[100]).send();
                    }
                }
            }
            case "subscribe" -> {
                try (Consumer<byte[]> consumer = client.newConsumer().topic(topic).subscriptionName(words[2])
                        .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe()) {
                    for (int number = 0; number < Integer.parseInt(words[3]); number++) {
                        Message<byte[]> message = consumer.receive(20, TimeUnit.SECONDS);
                        consumer.acknowledgeAsync(message.getMessageId()).get();
                    }
                    Thread.sleep(1500); // Acknowledgements are grouped, and positions written once a second.
                }
            }
            case "schema" -> {
                try (Producer<String> producer = client.newProducer(Schema.STRING).topic(topic).create()) {
                    producer.send("text");
                }
            }
            case "delay" -> {
                try (Consumer<byte[]> consumer = client.newConsumer().topic(topic).subscriptionName(words[2])
                        .subscriptionType(SubscriptionType.Shared).subscribe();
                        Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(false).create()) {
                    for (int number = 0; number < Integer.parseInt(words[3]); number++) {
                        producer.newMessage().value(new byte[10]).deliverAfter(3600 + number, TimeUnit.SECONDS).send();
                    }
                    consumer.receive(3, TimeUnit.SECONDS);
                }
            }
            case "compact" -> {
                admin.topics().triggerCompaction(topic);
                while (admin.topics().compactionStatus(topic).status == LongRunningProcessStatus.Status.RUNNING) {
                    Thread.sleep(50);
                }
                return "{\"status\": \"" + admin.topics().compactionStatus(topic).status + "\"}";
            }
            case "offload" -> {
                admin.topics().triggerOffload(topic, admin.topics().getLastMessageId(topic));
                while (admin.topics().offloadStatus(topic).getStatus() == LongRunningProcessStatus.Status.RUNNING) {
                    Thread.sleep(50);
                }
                String problem = admin.topics().offloadStatus(topic).getLastError();
                if (!problem.isEmpty()) {
                    throw new IllegalStateException(problem);
                }
            }
            case "lag" -> offloader.policies.setManagedLedgerOffloadDeletionLagInMillis(Long.parseLong(words[1]));
            case "unload" -> admin.topics().unload(topic);
            case "skip" -> admin.topics().skipAllMessages(topic, words[2]);
            case "trim" -> admin.topics().trimTopic(topic);
            case "delete" -> admin.topics().delete(topic, true);
            case "unsubscribe" -> admin.topics().deleteSubscription(topic, words[2], true);
            case "namespace" -> admin.namespaces().createNamespace(topic, Set.of("test"));
            case "drop" -> admin.namespaces().deleteNamespace(topic, true);
            case "ledgers" -> {
                PersistentTopicInternalStats stats = admin.topics().getInternalStats(topic);
                List<String> ids = new ArrayList<>();
                stats.ledgers.forEach(each -> ids.add("" + each.ledgerId));
                List<String> offloaded = new ArrayList<>();
                stats.ledgers.stream().filter(each -> each.offloaded).forEach(each -> offloaded.add("" + each.ledgerId));
                List<String> cursors = new ArrayList<>();
                stats.cursors.forEach((name, each) -> cursors.add("\"" + name + "\": [" + each.cursorLedger + ", \""
                        + each.markDeletePosition + "\", " + each.messagesConsumedCounter + "]"));
                List<String> schemas = new ArrayList<>();
                stats.schemaLedgers.forEach(each -> schemas.add("" + each.ledgerId));
                return "{\"ledgers\": " + ids + ", \"cursors\": {" + String.join(", ", cursors) + "}, \"schemas\": "
                        + schemas + ", \"compacted\": " + stats.compactedLedger.ledgerId + ", \"offloaded\": " + offloaded + "}";
            }
            case "backlog" -> {
                List<String> found = new ArrayList<>();
                admin.topics().getStats(topic, true, false, false).getSubscriptions().forEach((name, each) ->
                        found.add("\"" + name + "\": " + each.getMsgBacklog()));
                return "{" + String.join(", ", found) + "}";
            }
            default -> throw new IllegalArgumentException(words[0]);
        }
        return "{}";
    }
}
