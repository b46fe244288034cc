import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.logging.Level;
import java.util.logging.Logger;

import io.anserini.analysis.DefaultEnglishAnalyzer;
import io.anserini.search.similarity.ImpactSimilarity;
import org.apache.lucene.analysis.Analyzer;
import org.apache.lucene.analysis.TokenStream;
import org.apache.lucene.analysis.tokenattributes.BytesTermAttribute;
import org.apache.lucene.analysis.tokenattributes.CharTermAttribute;
import org.apache.lucene.analysis.tokenattributes.TermFrequencyAttribute;
import org.apache.lucene.document.BinaryDocValuesField;
import org.apache.lucene.document.Document;
import org.apache.lucene.document.Field;
import org.apache.lucene.document.FieldType;
import org.apache.lucene.document.NumericDocValuesField;
import org.apache.lucene.document.StoredField;
import org.apache.lucene.document.StringField;
import org.apache.lucene.index.BinaryDocValues;
import org.apache.lucene.index.DirectoryReader;
import org.apache.lucene.index.DocValuesType;
import org.apache.lucene.index.FieldInfo;
import org.apache.lucene.index.IndexOptions;
import org.apache.lucene.index.IndexWriter;
import org.apache.lucene.index.IndexWriterConfig;
import org.apache.lucene.index.LeafReader;
import org.apache.lucene.index.LeafReaderContext;
import org.apache.lucene.index.SortedDocValues;
import org.apache.lucene.index.StoredFields;
import org.apache.lucene.index.Term;
import org.apache.lucene.index.TermVectors;
import org.apache.lucene.index.Terms;
import org.apache.lucene.index.TermsEnum;
import org.apache.lucene.search.BooleanClause;
import org.apache.lucene.search.BooleanQuery;
import org.apache.lucene.search.BoostQuery;
import org.apache.lucene.search.Collector;
import org.apache.lucene.search.CollectionStatistics;
import org.apache.lucene.search.IndexSearcher;
import org.apache.lucene.search.LeafCollector;
import org.apache.lucene.search.Scorable;
import org.apache.lucene.search.ScoreMode;
import org.apache.lucene.search.Sort;
import org.apache.lucene.search.SortField;
import org.apache.lucene.search.TermQuery;
import org.apache.lucene.search.similarities.BM25Similarity;
import org.apache.lucene.search.similarities.Similarity;
import org.apache.lucene.store.Directory;
import org.apache.lucene.store.FSDirectory;
import org.apache.lucene.util.AttributeFactory;
import org.apache.lucene.util.BytesRef;
import org.apache.lucene.util.BytesRefHash;
import org.apache.lucene.util.IntroSorter;
import org.apache.lucene.util.Version;

/**
 * The Java side of prf/lucene.py and prf/lucene_build.py: whole batches in, whole batches out.
 *
 * Every call takes and gives byte arrays, because those are the only arrays that cross pyjnius without
 * one Python object per element. All numbers are little endian. A block of strings is its lengths as
 * int32, then the UTF-8 bytes of all of them; how many there are is known from what stands before.
 */
public final class PrfLucene {
  /** SHA-256 of this file with these 64 digits left out; a test compares it with the file. */
  static final String SOURCE_SHA256 = "1a563292f0a8bcbd9c3bc8587e040db03224d9e2aecefcfc0390500a688f0f80";

  private static final String ID = "id";
  private static final String CONTENTS = "contents";
  private static final String RAW = "raw";
  private static final String ROW = "prf_row";

  // Lucene greets its users through java.util.logging (no vector module, newer Java than it knows);
  // the reference keeps the level from being garbage collected.
  private static final Logger LUCENE_LOG = Logger.getLogger("org.apache.lucene");

  static {
    LUCENE_LOG.setLevel(Level.SEVERE);
  }

  private static final Analyzer ANALYZER = DefaultEnglishAnalyzer.newDefaultInstance();

  private PrfLucene() {}

  public static String luceneVersion() {
    return Version.LATEST.toString();
  }

  public static String javaVersion() {
    return System.getProperty("java.version");
  }

  /**
   * Analyses texts.
   *
   * @param request int n, n strings
   * @return int distinct terms of each text, int count of each term, the terms as strings; terms in
   *     the order of their first appearance
   */
  public static byte[] analyze(byte[] request) throws IOException {
    ByteBuffer in = wrap(request);
    Strings texts = new Strings(in, in.getInt());
    Ints perText = new Ints();
    Ints counts = new Ints();
    Ints lengths = new Ints();
    Bytes bytes = new Bytes();
    for (int i = 0; i < texts.size(); i++) {
      Map<String, int[]> terms = new LinkedHashMap<>();
      try (TokenStream stream = ANALYZER.tokenStream(CONTENTS, texts.string(i))) {
        CharTermAttribute term = stream.addAttribute(CharTermAttribute.class);
        stream.reset();
        while (stream.incrementToken()) {
          if (term.length() > 0) {
            terms.computeIfAbsent(term.toString(), unused -> new int[1])[0]++;
          }
        }
        stream.end();
      }
      perText.add(terms.size());
      for (Map.Entry<String, int[]> entry : terms.entrySet()) {
        byte[] utf8 = entry.getKey().getBytes(StandardCharsets.UTF_8);
        counts.add(entry.getValue()[0]);
        lengths.add(utf8.length);
        bytes.add(utf8, 0, utf8.length);
      }
    }
    ByteBuffer out = allocate(4L * (perText.size + 2L * counts.size) + bytes.size);
    perText.put(out);
    counts.put(out);
    lengths.put(out);
    bytes.put(out);
    return out.array();
  }

  /**
   * Starts an index.
   *
   * @param impacts whether documents come as weighted terms, to be scored by ImpactSimilarity, and
   *     not as texts to be analysed
   */
  public static Writer create(byte[] path, boolean impacts, int threads) throws IOException {
    return new Writer(Path.of(utf8(path)), impacts, threads);
  }

  public static Reader open(byte[] path) throws IOException {
    return new Reader(Path.of(utf8(path)));
  }

  /** Builds one index; used by one thread. */
  public static final class Writer {
    private final Directory directory;
    private final IndexWriter writer;
    private final ExecutorService pool;
    private final boolean impacts;
    private final int threads;
    private final FieldType contentsType = new FieldType();
    private List<Future<Void>> pending = List.of();

    private Writer(Path path, boolean impacts, int threads) throws IOException {
      this.impacts = impacts;
      this.threads = threads;
      contentsType.setStoreTermVectors(true);
      contentsType.setIndexOptions(IndexOptions.DOCS_AND_FREQS);
      contentsType.freeze();
      directory = FSDirectory.open(path);
      IndexWriterConfig config = new IndexWriterConfig(ANALYZER);
      config.setOpenMode(IndexWriterConfig.OpenMode.CREATE);
      config.setSimilarity(impacts ? new ImpactSimilarity() : new BM25Similarity());
      config.setRAMBufferSizeMB(Math.min(256, Runtime.getRuntime().maxMemory() / (4 << 20)));
      // Threads finish in any order; sorted, the internal number of a document is its place in the
      // input whatever they do, so that the same input always gives the same index.
      config.setIndexSort(new Sort(new SortField(ROW, SortField.Type.LONG)));
      writer = new IndexWriter(directory, config);
      pool = pool(threads);
    }

    /**
     * Takes a batch and returns at once, unless the batch before is still being indexed.
     *
     * @param request int n, n docnos as strings, n texts as strings; for impacts, then int terms of
     *     each document, int weight of each term, the terms as strings
     * @param firstRow place of the first document in the input
     */
    public void add(byte[] request, long firstRow) throws Exception {
      await();
      ByteBuffer in = wrap(request);
      int n = in.getInt();
      Strings docnos = new Strings(in, n);
      Strings texts = new Strings(in, n);
      Impacts vectors = impacts ? new Impacts(in, n) : null;
      AtomicInteger next = new AtomicInteger();
      List<Future<Void>> work = new ArrayList<>();
      for (int t = 0; t < threads; t++) {
        work.add(pool.submit((Callable<Void>) () -> {
          for (int i = next.getAndIncrement(); i < n; i = next.getAndIncrement()) {
            String docno = docnos.string(i);
            String text = texts.string(i);
            Field contents =
                impacts
                    ? new Field(CONTENTS, new ImpactStream(vectors, i), contentsType)
                    : new Field(CONTENTS, text, contentsType);
            String raw = json(docno, text, vectors, i);
            writer.addDocument(document(docno, raw, contents, firstRow + i));
          }
          return null;
        }));
      }
      pending = work;
    }

    /** Merges to one segment, commits and closes. */
    public void finish() throws Exception {
      await();
      writer.forceMerge(1);
      writer.commit();
      writer.close();
      close();
    }

    /** Gives up; what is on disk is not an index. */
    public void abort() throws IOException {
      pool.shutdownNow();
      try {
        writer.rollback();
      } finally {
        close();
      }
    }

    private void await() throws Exception {
      List<Future<Void>> work = pending;
      pending = List.of();
      join(work);
    }

    private void close() throws IOException {
      pool.shutdown();
      directory.close();
    }

    /** The fields of Anserini's IndexCollection with -storeDocvectors -storeRaw, and the row. */
    private Document document(String docno, String raw, Field contents, long row) {
      Document document = new Document();
      document.add(new StringField(ID, docno, Field.Store.YES));
      document.add(new BinaryDocValuesField(ID, new BytesRef(docno)));
      document.add(new StoredField(RAW, raw));
      document.add(contents);
      document.add(new NumericDocValuesField(ROW, row));
      return document;
    }
  }

  /** Reads one index; used by any number of threads. */
  public static final class Reader {
    private final Directory directory;
    private final DirectoryReader reader;
    private int[] rankOf;
    private int[] byRank;

    private Reader(Path path) throws IOException {
      directory = FSDirectory.open(path);
      try {
        reader = DirectoryReader.open(directory);
      } catch (IOException | RuntimeException error) {
        directory.close();
        throw error;
      }
    }

    public void close() throws IOException {
      reader.close();
      directory.close();
    }

    /**
     * @return long: size of the id space, documents, documents with contents, terms in all of them,
     *     1 if the documents are named and have contents, 1 if all contents have term vectors
     */
    public byte[] statistics() throws IOException {
      CollectionStatistics contents = new IndexSearcher(reader).collectionStatistics(CONTENTS);
      boolean vectors = true;
      boolean named = false;
      boolean indexed = false;
      for (LeafReaderContext leaf : reader.leaves()) {
        FieldInfo info = leaf.reader().getFieldInfos().fieldInfo(CONTENTS);
        named |= leaf.reader().getFieldInfos().fieldInfo(ID) != null;
        indexed |= info != null && info.getIndexOptions() != IndexOptions.NONE;
        vectors &= leaf.reader().terms(CONTENTS) == null || info.hasVectors();
      }
      ByteBuffer out = allocate(48);
      out.putLong(reader.maxDoc());
      out.putLong(reader.numDocs());
      out.putLong(contents == null ? 0 : contents.docCount());
      out.putLong(contents == null ? 0 : contents.sumTotalTermFreq());
      out.putLong(named && indexed ? 1 : 0);
      out.putLong(vectors ? 1 : 0);
      return out.array();
    }

    /** @return the docnos by internal number, as strings; how many is the size of the id space */
    public byte[] docnos() throws IOException {
      Ints lengths = new Ints();
      Bytes bytes = new Bytes();
      readDocnos(lengths, bytes);
      ByteBuffer out = allocate(4L * lengths.size + bytes.size);
      lengths.put(out);
      bytes.put(out);
      return out.array();
    }

    /**
     * Searches bags of weighted terms under BM25.
     *
     * @param request int n; int terms of each query; float weight of each term; the terms as strings
     * @param idf whether rare terms count more
     * @return int hits of each query, int internal numbers, float scores; best first, ties by docno
     */
    public byte[] search(byte[] request, int k, float k1, float b, boolean idf, int threads)
        throws Exception {
      Similarity bm25 = idf ? new BM25Similarity(k1, b) : new WithoutIdf(k1, b);
      return search(request, k, bm25, threads);
    }

    /** As search, but a document's score is its dot product with the query. */
    public byte[] searchImpacts(byte[] request, int k, int threads) throws Exception {
      return search(request, k, new ImpactSimilarity(), threads);
    }

    private byte[] search(byte[] request, int k, Similarity similarity, int threads)
        throws Exception {
      orderDocnos();
      ByteBuffer in = wrap(request);
      int n = in.getInt();
      int[] starts = starts(in, n);
      int most = 0;
      for (int i = 0; i < n; i++) {
        most = Math.max(most, starts[i + 1] - starts[i]);
      }
      float[] weights = new float[starts[n]];
      for (int i = 0; i < weights.length; i++) {
        weights[i] = in.getFloat();
      }
      Strings terms = new Strings(in, starts[n]);
      // A limit on what users type, which makes no sense for queries that a program expands.
      if (most > IndexSearcher.getMaxClauseCount()) {
        IndexSearcher.setMaxClauseCount(Integer.MAX_VALUE);
      }
      IndexSearcher searcher = new IndexSearcher(reader);
      searcher.setSimilarity(similarity);
      int depth = Math.min(k, reader.maxDoc());
      long[][] found = new long[n][];
      AtomicInteger next = new AtomicInteger();
      Callable<Void> work = () -> {
        for (int i = next.getAndIncrement(); i < n; i = next.getAndIncrement()) {
          found[i] = search(searcher, terms, weights, starts[i], starts[i + 1], depth);
        }
        return null;
      };
      int workers = Math.min(threads, n);
      if (workers <= 1) {
        work.call();
      } else {
        ExecutorService pool = pool(workers);
        try {
          List<Future<Void>> running = new ArrayList<>();
          for (int t = 0; t < workers; t++) {
            running.add(pool.submit(work));
          }
          join(running);
        } finally {
          pool.shutdownNow();
        }
      }
      long hits = 0;
      for (long[] keys : found) {
        hits += keys.length;
      }
      ByteBuffer out = allocate(4L * n + 8 * hits);
      for (long[] keys : found) {
        out.putInt(keys.length);
      }
      for (long[] keys : found) {
        for (int i = keys.length - 1; i >= 0; i--) {
          out.putInt(byRank[Integer.MAX_VALUE - (int) keys[i]]);
        }
      }
      for (long[] keys : found) {
        for (int i = keys.length - 1; i >= 0; i--) {
          out.putInt((int) (keys[i] >>> 32));
        }
      }
      return out.array();
    }

    private long[] search(
        IndexSearcher searcher, Strings terms, float[] weights, int start, int stop, int depth)
        throws IOException {
      if (start == stop || depth == 0) {
        return new long[0];
      }
      BooleanQuery.Builder query = new BooleanQuery.Builder();
      for (int i = start; i < stop; i++) {
        query.add(
            new BoostQuery(new TermQuery(new Term(CONTENTS, terms.ref(i))), weights[i]),
            BooleanClause.Occur.SHOULD);
      }
      Best best = new Best(depth, rankOf);
      searcher.search(query.build(), best);
      return best.sorted();
    }

    /**
     * Reads term vectors.
     *
     * @param request int internal numbers
     * @return int distinct terms of each document; int size of the vocabulary; int term of each entry;
     *     int frequency of each entry; for each vocabulary term, int document frequency and long
     *     collection frequency; the vocabulary as strings
     */
    public byte[] vectors(byte[] request) throws IOException {
      ByteBuffer in = wrap(request);
      int n = request.length / 4;
      Ints perDocument = new Ints();
      Ints terms = new Ints();
      Ints frequencies = new Ints();
      BytesRefHash vocabulary = new BytesRefHash();
      TermVectors vectors = reader.termVectors();
      for (int i = 0; i < n; i++) {
        int before = terms.size;
        Terms vector = vectors.get(in.getInt(), CONTENTS);
        if (vector != null) {
          TermsEnum entries = vector.iterator();
          for (BytesRef term = entries.next(); term != null; term = entries.next()) {
            int code = vocabulary.add(term);
            terms.add(code < 0 ? -code - 1 : code);
            frequencies.add((int) entries.totalTermFreq());
          }
        }
        perDocument.add(terms.size - before);
      }
      int words = vocabulary.size();
      int[] documentFrequencies = new int[words];
      long[] collectionFrequencies = new long[words];
      count(vocabulary, documentFrequencies, collectionFrequencies);
      Ints lengths = new Ints();
      Bytes bytes = new Bytes();
      BytesRef term = new BytesRef();
      for (int i = 0; i < words; i++) {
        vocabulary.get(i, term);
        lengths.add(term.length);
        bytes.add(term.bytes, term.offset, term.length);
      }
      ByteBuffer out = allocate(4L * (n + 1 + 2L * terms.size + 4L * words) + bytes.size);
      perDocument.put(out);
      out.putInt(words);
      terms.put(out);
      frequencies.put(out);
      for (int frequency : documentFrequencies) {
        out.putInt(frequency);
      }
      for (long frequency : collectionFrequencies) {
        out.putLong(frequency);
      }
      lengths.put(out);
      bytes.put(out);
      return out.array();
    }

    /** Adds up in how many documents, and how often, the terms occur in all segments. */
    private void count(BytesRefHash vocabulary, int[] documents, long[] occurrences)
        throws IOException {
      BytesRef term = new BytesRef();
      for (LeafReaderContext leaf : reader.leaves()) {
        Terms contents = leaf.reader().terms(CONTENTS);
        if (contents == null) {
          continue;
        }
        TermsEnum entries = contents.iterator();
        for (int i = 0; i < documents.length; i++) {
          vocabulary.get(i, term);
          if (entries.seekExact(term)) {
            documents[i] += entries.docFreq();
            occurrences[i] += entries.totalTermFreq();
          }
        }
      }
    }

    /**
     * Counts documents.
     *
     * @param request int n, n terms as strings
     * @return int documents with each term in their contents
     */
    public byte[] frequencies(byte[] request) throws IOException {
      ByteBuffer in = wrap(request);
      Strings terms = new Strings(in, in.getInt());
      ByteBuffer out = allocate(4L * terms.size());
      for (int i = 0; i < terms.size(); i++) {
        out.putInt(reader.docFreq(new Term(CONTENTS, terms.ref(i))));
      }
      return out.array();
    }

    /**
     * Reads stored texts.
     *
     * @param request int internal numbers
     * @return int kind of each text (0 nothing stored, 1 contents, 2 raw), the texts as strings
     */
    public byte[] texts(byte[] request) throws IOException {
      ByteBuffer in = wrap(request);
      int n = request.length / 4;
      Ints kinds = new Ints();
      Ints lengths = new Ints();
      Bytes bytes = new Bytes();
      StoredFields stored = reader.storedFields();
      for (int i = 0; i < n; i++) {
        Document document = stored.document(in.getInt());
        String contents = document.get(CONTENTS);
        String raw = contents == null ? document.get(RAW) : null;
        byte[] utf8 =
            (contents != null ? contents : raw != null ? raw : "").getBytes(StandardCharsets.UTF_8);
        kinds.add(contents != null ? 1 : raw != null ? 2 : 0);
        lengths.add(utf8.length);
        bytes.add(utf8, 0, utf8.length);
      }
      ByteBuffer out = allocate(8L * n + bytes.size);
      kinds.put(out);
      lengths.put(out);
      bytes.put(out);
      return out.array();
    }

    private void readDocnos(Ints lengths, Bytes bytes) throws IOException {
      for (LeafReaderContext context : reader.leaves()) {
        LeafReader leaf = context.reader();
        FieldInfo info = leaf.getFieldInfos().fieldInfo(ID);
        DocValuesType type = info == null ? DocValuesType.NONE : info.getDocValuesType();
        BinaryDocValues binary = type == DocValuesType.BINARY ? leaf.getBinaryDocValues(ID) : null;
        SortedDocValues sorted = type == DocValuesType.SORTED ? leaf.getSortedDocValues(ID) : null;
        StoredFields stored = binary == null && sorted == null ? leaf.storedFields() : null;
        for (int i = 0; i < leaf.maxDoc(); i++) {
          BytesRef docno;
          if (binary != null) {
            docno = binary.advanceExact(i) ? binary.binaryValue() : new BytesRef();
          } else if (sorted != null) {
            docno = sorted.advanceExact(i) ? sorted.lookupOrd(sorted.ordValue()) : new BytesRef();
          } else {
            String text = stored.document(i, Set.of(ID)).get(ID);
            docno = new BytesRef(text == null ? "" : text);
          }
          lengths.add(docno.length);
          bytes.add(docno.bytes, docno.offset, docno.length);
        }
      }
    }

    /** Numbers the documents by docno. UTF-8 bytes sort like code points, as Python's text does. */
    private synchronized void orderDocnos() throws IOException {
      if (rankOf != null) {
        return;
      }
      Ints lengths = new Ints();
      Bytes bytes = new Bytes();
      readDocnos(lengths, bytes);
      int n = lengths.size;
      int[] starts = new int[n + 1];
      int[] order = new int[n];
      for (int i = 0; i < n; i++) {
        starts[i + 1] = starts[i] + lengths.items[i];
        order[i] = i;
      }
      new IntroSorter() {
        private int pivot;

        @Override
        protected void setPivot(int i) {
          pivot = order[i];
        }

        @Override
        protected int comparePivot(int j) {
          return order(pivot, order[j]);
        }

        @Override
        protected int compare(int i, int j) {
          return order(order[i], order[j]);
        }

        @Override
        protected void swap(int i, int j) {
          int kept = order[i];
          order[i] = order[j];
          order[j] = kept;
        }

        private int order(int x, int y) {
          int byDocno =
              Arrays.compareUnsigned(
                  bytes.items, starts[x], starts[x + 1], bytes.items, starts[y], starts[y + 1]);
          return byDocno != 0 ? byDocno : Integer.compare(x, y);
        }
      }.sort(0, n);
      int[] ranks = new int[n];
      for (int i = 0; i < n; i++) {
        ranks[order[i]] = i;
      }
      byRank = order;
      rankOf = ranks;
    }
  }

  /**
   * The best hits by score, then by docno.
   *
   * A hit is one long that compares like the hit does: the score's bits, which order as the score
   * because scores are never negative, above the docno's rank counted downwards.
   */
  private static final class Best implements Collector {
    private final long[] heap; // smallest first
    private final int[] rankOf;
    private int size;

    Best(int depth, int[] rankOf) {
      this.heap = new long[depth];
      this.rankOf = rankOf;
    }

    @Override
    public ScoreMode scoreMode() {
      return ScoreMode.TOP_SCORES;
    }

    @Override
    public LeafCollector getLeafCollector(LeafReaderContext context) {
      int base = context.docBase;
      return new LeafCollector() {
        private Scorable scorer;

        @Override
        public void setScorer(Scorable scorer) throws IOException {
          this.scorer = scorer;
          if (size == heap.length) {
            raise();
          }
        }

        @Override
        public void collect(int document) throws IOException {
          long key =
              ((long) Float.floatToIntBits(scorer.score()) << 32)
                  | (Integer.MAX_VALUE - rankOf[base + document]);
          if (size < heap.length) {
            up(key);
            if (size == heap.length) {
              raise();
            }
          } else if (key > heap[0]) {
            int before = (int) (heap[0] >>> 32);
            down(key);
            if ((int) (heap[0] >>> 32) != before) {
              raise();
            }
          }
        }

        /** Lets Lucene skip what scores less than the last hit, never what scores the same. */
        private void raise() throws IOException {
          scorer.setMinCompetitiveScore(Float.intBitsToFloat((int) (heap[0] >>> 32)));
        }
      };
    }

    /** The hits, worst first. */
    long[] sorted() {
      long[] keys = Arrays.copyOf(heap, size);
      Arrays.sort(keys);
      return keys;
    }

    private void up(long key) {
      int child = size++;
      while (child > 0) {
        int parent = (child - 1) >>> 1;
        if (heap[parent] <= key) {
          break;
        }
        heap[child] = heap[parent];
        child = parent;
      }
      heap[child] = key;
    }

    private void down(long key) {
      int parent = 0;
      int half = size >>> 1;
      while (parent < half) {
        int child = 2 * parent + 1;
        if (child + 1 < size && heap[child + 1] < heap[child]) {
          child++;
        }
        if (heap[child] >= key) {
          break;
        }
        heap[parent] = heap[child];
        parent = child;
      }
      heap[parent] = key;
    }
  }

  /** BM25 with the same idf of 1 for all terms, as in the second pass of Anserini's BM25PRF. */
  private static final class WithoutIdf extends BM25Similarity {
    WithoutIdf(float k1, float b) {
      super(k1, b);
    }

    @Override
    protected float idf(long documentFrequency, long documents) {
      return 1;
    }
  }

  /** A block of weighted terms of n documents inside a request. */
  private static final class Impacts {
    private final int[] starts;
    private final int[] weights;
    private final Strings terms;

    Impacts(ByteBuffer in, int n) {
      starts = starts(in, n);
      weights = new int[starts[n]];
      for (int i = 0; i < weights.length; i++) {
        weights[i] = in.getInt();
      }
      terms = new Strings(in, weights.length);
    }
  }

  /** One document's weighted terms as Lucene takes them: the weight is the term's frequency. */
  private static final class ImpactStream extends TokenStream {
    private final Impacts impacts;
    private final int start;
    private final int stop;
    private final BytesTermAttribute term;
    private final TermFrequencyAttribute frequency;
    private int next;

    ImpactStream(Impacts impacts, int document) {
      super(AttributeFactory.DEFAULT_ATTRIBUTE_FACTORY); // the other one knows text terms only
      this.impacts = impacts;
      start = impacts.starts[document];
      stop = impacts.starts[document + 1];
      term = addAttribute(BytesTermAttribute.class);
      frequency = addAttribute(TermFrequencyAttribute.class);
    }

    @Override
    public void reset() throws IOException {
      super.reset();
      next = start;
    }

    @Override
    public boolean incrementToken() {
      if (next == stop) {
        return false;
      }
      clearAttributes();
      term.setBytesRef(impacts.terms.ref(next));
      frequency.setTermFrequency(impacts.weights[next]);
      next++;
      return true;
    }
  }

  /** A block of strings inside a request. */
  private static final class Strings {
    private final byte[] bytes;
    private final int[] starts;

    Strings(ByteBuffer in, int n) {
      bytes = in.array();
      starts = new int[n + 1];
      starts[0] = in.position() + 4 * n;
      for (int i = 0; i < n; i++) {
        starts[i + 1] = starts[i] + in.getInt();
      }
      in.position(starts[n]);
    }

    int size() {
      return starts.length - 1;
    }

    String string(int i) {
      return new String(bytes, starts[i], starts[i + 1] - starts[i], StandardCharsets.UTF_8);
    }

    BytesRef ref(int i) {
      return new BytesRef(bytes, starts[i], starts[i + 1] - starts[i]);
    }
  }

  private static final class Ints {
    int[] items = new int[64];
    int size;

    void add(int item) {
      if (size == items.length) {
        items = Arrays.copyOf(items, grown(size, 1));
      }
      items[size++] = item;
    }

    void put(ByteBuffer out) {
      out.asIntBuffer().put(items, 0, size);
      out.position(out.position() + 4 * size);
    }
  }

  private static final class Bytes {
    byte[] items = new byte[1024];
    int size;

    void add(byte[] from, int start, int length) {
      if (length > items.length - size) {
        items = Arrays.copyOf(items, grown(size, length));
      }
      System.arraycopy(from, start, items, size, length);
      size += length;
    }

    void put(ByteBuffer out) {
      out.put(items, 0, size);
    }
  }

  /** Reads n sizes; item i owns what is between entries i and i + 1 of the answer. */
  private static int[] starts(ByteBuffer in, int n) {
    int[] starts = new int[n + 1];
    for (int i = 0; i < n; i++) {
      starts[i + 1] = starts[i] + in.getInt();
    }
    return starts;
  }

  private static int grown(int size, int more) {
    long limit = Integer.MAX_VALUE - 16;
    if ((long) size + more > limit) {
      throw new IllegalStateException("answer is larger than 2 GB; ask for fewer at a time");
    }
    return (int) Math.min(limit, Math.max(2L * size, (long) size + more));
  }

  private static ByteBuffer allocate(long size) {
    if (size > Integer.MAX_VALUE - 16) {
      throw new IllegalStateException("answer is larger than 2 GB; ask for fewer at a time");
    }
    return ByteBuffer.allocate((int) size).order(ByteOrder.LITTLE_ENDIAN);
  }

  private static ByteBuffer wrap(byte[] request) {
    return ByteBuffer.wrap(request).order(ByteOrder.LITTLE_ENDIAN);
  }

  private static String utf8(byte[] bytes) {
    return new String(bytes, StandardCharsets.UTF_8);
  }

  private static ExecutorService pool(int threads) {
    return Executors.newFixedThreadPool(
        threads,
        run -> {
          Thread thread = new Thread(run, "prf-lucene");
          thread.setDaemon(true); // never keeps Python from ending
          return thread;
        });
  }

  /** Waits for all, then throws the first failure as itself. */
  private static void join(List<Future<Void>> work) throws Exception {
    ExecutionException failure = null;
    for (Future<Void> future : work) {
      try {
        future.get();
      } catch (ExecutionException error) {
        failure = failure == null ? error : failure;
      }
    }
    if (failure != null) {
      if (failure.getCause() instanceof Exception error) {
        throw error;
      }
      if (failure.getCause() instanceof Error error) {
        throw error;
      }
      throw failure;
    }
  }

  /** The document as Anserini's JsonCollection, or with impacts JsonVectorCollection, has it. */
  private static String json(String docno, String text, Impacts impacts, int document) {
    StringBuilder out = new StringBuilder(docno.length() + text.length() + 32);
    out.append("{\"id\":");
    quote(out, docno);
    out.append(",\"contents\":");
    quote(out, text);
    if (impacts != null) {
      out.append(",\"vector\":{");
      int start = impacts.starts[document];
      for (int i = start; i < impacts.starts[document + 1]; i++) {
        if (i > start) {
          out.append(',');
        }
        quote(out, impacts.terms.string(i));
        out.append(':').append(impacts.weights[i]);
      }
      out.append('}');
    }
    return out.append('}').toString();
  }

  private static void quote(StringBuilder out, String text) {
    out.append('"');
    for (int i = 0; i < text.length(); i++) {
      char c = text.charAt(i);
      if (c == '"' || c == '\\') {
        out.append('\\').append(c);
      } else if (c < ' ') {
        out.append(String.format("\\u%04x", (int) c));
      } else {
        out.append(c);
      }
    }
    out.append('"');
  }
}
