import com.fasterxml.jackson.databind.DeserializationFeature;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;

/** Reads lines of a class, a tab and JSON; prints for each the object that the class makes of it, as JSON, or the error. */
public final class RestAnswers {
    private RestAnswers() {}

    public static void main(String[] arguments) throws Exception {
        ObjectMapper mapper = new ObjectMapper().enable(
                DeserializationFeature.FAIL_ON_UNKNOWN_PROPERTIES, DeserializationFeature.FAIL_ON_NULL_FOR_PRIMITIVES);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] parts = line.split("\t", 2);
            try {
                System.out.println(mapper.writeValueAsString(mapper.readValue(parts[1], Class.forName(parts[0]))));
            } catch (com.fasterxml.jackson.core.JsonProcessingException error) {
                System.out.println(mapper.writeValueAsString("refused: " + error.getOriginalMessage()));
            }
        }
    }
}
