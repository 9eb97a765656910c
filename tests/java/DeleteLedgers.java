import java.util.Arrays;
import org.apache.bookkeeper.client.BookKeeper;

/** DeleteLedgers METADATA-URI LEDGER-ID…: deletes ledgers through Apache's client. */
public final class DeleteLedgers {
    private DeleteLedgers() {}

    public static void main(String[] arguments) {
        Support.main(() -> {
            BookKeeper client = Support.connect(arguments[0], false);
            for (String ledgerId : Arrays.asList(arguments).subList(1, arguments.length)) {
                client.deleteLedger(Long.parseLong(ledgerId));
            }
            Support.abandon(client);
        });
    }
}
