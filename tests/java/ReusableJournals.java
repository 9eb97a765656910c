import org.apache.bookkeeper.bookie.DefaultFileChannelProvider;

/** For the settings `journalChannelProvider` and `journalReuseFiles`: a new journal takes the file of one that is done. */
public final class ReusableJournals extends DefaultFileChannelProvider {
    @Override
    public boolean supportReuseFile() {
        return true;
    }
}
