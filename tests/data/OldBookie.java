import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.util.concurrent.CountDownLatch;
import org.apache.bookkeeper.bookie.Bookie;
import org.apache.bookkeeper.conf.ServerConfiguration;
import org.apache.bookkeeper.proto.BookkeeperInternalCallbacks.WriteCallback;

/**
 * Lets the bookie of BookKeeper 4.0 or 4.1 journal the entries on stdin, without a cluster; see make_journals.py.
 *
 * <p>OldBookie DIRECTORY. A line is an entry in hex; after an empty line the ones before are waited for.
 */
public final class OldBookie {
    public static void main(String[] arguments) throws Exception {
        ServerConfiguration conf = new ServerConfiguration();
        conf.setZkServers(null);
        conf.setBookiePort(3181);
        conf.setJournalDirName(arguments[0] + "/journal-0");
        conf.setLedgerDirNames(new String[] {arguments[0] + "/ledgers-0"});
        new File(arguments[0], "journal-0").mkdirs();
        new File(arguments[0], "ledgers-0").mkdirs();
        Bookie bookie = new Bookie(conf);
        if (!bookie.isAlive()) { // 4.0 starts by itself
            bookie.start();
        }
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        int count = 0;
        CountDownLatch[] added = {new CountDownLatch(1 << 20)};
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            if (line.isEmpty()) {
                while ((1 << 20) - added[0].getCount() < count) {
                    Thread.sleep(1);
                }
                continue;
            }
            byte[] bytes = new BigInteger("01" + line, 16).toByteArray();
            ByteBuffer entry = ByteBuffer.wrap(bytes, 1, bytes.length - 1).slice();
            WriteCallback done = (code, ledgerId, entryId, address, context) -> added[0].countDown();
            bookie.addEntry(entry, done, null, new byte[] {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20});
            count++;
        }
        System.out.println(count);
        System.exit(0);
    }
}
