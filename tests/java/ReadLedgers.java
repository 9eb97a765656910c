import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Enumeration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.LedgerEntry;
import org.apache.bookkeeper.client.LedgerHandle;

/**
 * Opens ledgers and reads them in full: ReadLedgers METADATA-URI v2|v3, and a line on stdin for each:
 * `LEDGER-ID DIGEST-TYPE PASSWORD-BASE64 recover|no-recover` (an empty password is `-`).
 *
 * <p>Prints a JSON object for each, as WriteLedgers does, or {ledgerId, code, error} with BKException's code. Without
 * recovery it reads up to the last add confirmed.
 */
public final class ReadLedgers {
    private ReadLedgers() {}

    public static void main(String[] arguments) {
        Support.main(() -> run(arguments));
    }

    private static void run(String[] arguments) throws Exception {
        BookKeeper client = Support.connect(arguments[0], Support.isV2(arguments[1]));
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.trim().split(" ");
            Support.check(words.length == 4, "four words a line: " + line);
            long ledgerId = Long.parseUnsignedLong(words[0]);
            byte[] password = words[2].equals("-") ? new byte[0] : Base64.getDecoder().decode(words[2]);
            DigestType digestType = words[1].equals("HMAC") ? DigestType.MAC : DigestType.valueOf(words[1]);
            try {
                Support.print(read(client, ledgerId, digestType, password, words[3].equals("recover")));
            } catch (BKException error) {
                Map<String, Object> object = new LinkedHashMap<>();
                object.put("ledgerId", Long.toUnsignedString(ledgerId));
                object.put("code", error.getCode());
                object.put("error", BKException.getMessage(error.getCode()));
                Support.print(object);
            }
        }
        client.close();
    }

    private static Map<String, Object> read(
            BookKeeper client, long ledgerId, DigestType digestType, byte[] password, boolean recover) throws Exception {
        LedgerHandle handle = recover
                ? client.openLedger(ledgerId, digestType, password)
                : client.openLedgerNoRecovery(ledgerId, digestType, password);
        long last = handle.getLastAddConfirmed();
        List<Map<String, Object>> entries = new ArrayList<>();
        for (long first = 0; first <= last; first += 500) {
            Enumeration<LedgerEntry> found = handle.readEntries(first, Math.min(last, first + 499));
            while (found.hasMoreElements()) {
                LedgerEntry entry = found.nextElement();
                entries.add(Support.entry(entry.getEntryId(), entry.getEntry(), entry.getLength()));
            }
        }
        Map<String, Object> object = new LinkedHashMap<>(Support.ledger(handle, handle.getLedgerMetadata()));
        object.put("lastAddConfirmed", last);
        object.put("entries", entries);
        handle.close();
        return object;
    }
}
