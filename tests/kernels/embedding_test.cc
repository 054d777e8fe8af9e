#include "tests/kernels/kernel_test.h"
#include "tests/kernels/matrix.h"

namespace zero {
namespace {

struct Case {
  int64_t rows, vocab, width, extra;
};
constexpr Case kCases[] = {{0, 3, 8, 0},
                           {1, 1, 1, 0},
                           {33, 5, 31, 2},
                           {70, 11, 33, 0},
                           {300, 7, 1023, 1}};

TestVector<int32_t> Ids(int64_t rows, int64_t vocab) {
  std::mt19937_64 random(9);
  TestVector<int32_t> ids(rows);
  // Half of them are one id, as in text.
  for (int32_t& id : ids) {
    id = static_cast<int32_t>(random() % 2 == 0 ? vocab / 2 : random() % vocab);
  }
  return ids;
}

TEST(EmbeddingTest, ForwardGathersRows) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const Case& c : kCases) {
        const int64_t ld = c.width + c.extra;
        Array table = Array::Normal(dtype, c.vocab * ld, 1);
        Array position_table = Array::Normal(dtype, 4 * ld, 2);
        const TestVector<int32_t> ids = Ids(c.rows, c.vocab);
        TestVector<int32_t> position_ids(c.rows);
        for (int64_t i = 0; i < c.rows; ++i) position_ids[i] = i % 4;
        EmbeddingForwardArgs args;
        args.ids = ids.data();
        args.table = table.matrix(c.vocab, c.width, ld);
        for (const bool positions : {false, true}) {
          Array out(dtype, c.rows * ld), want(dtype, c.rows * ld);
          args.out = out.matrix(c.rows, c.width, ld);
          args.position_ids = positions ? position_ids.data() : nullptr;
          if (positions)
            args.position_table = position_table.matrix(4, c.width, ld);
          path.ops.EmbeddingForward(path.stream, args);
          for (int64_t i = 0; i < c.rows; ++i) {
            for (int64_t j = 0; j < c.width; ++j) {
              double value = table[ids[i] * ld + j];
              if (positions) value += position_table[position_ids[i] * ld + j];
              want.Set(i * ld + j, value);
            }
          }
          EXPECT_TRUE(out.SameBits(want)) << DTypeName(dtype) << c.rows;

          // A part of the table writes the rows of its ids.
          Array in_parts(dtype, c.rows * ld);
          for (int64_t first = 0; first < c.vocab; first += 2) {
            EmbeddingForwardArgs part = args;
            part.first = first;
            part.table =
                args.table.Rows(first, std::min<int64_t>(2, c.vocab - first));
            part.out = in_parts.matrix(c.rows, c.width, ld);
            path.ops.EmbeddingForward(path.stream, part);
          }
          EXPECT_TRUE(in_parts.SameBits(want)) << DTypeName(dtype) << c.rows;
        }
      }
    }
  });
}

// Ranks have pieces of a table, which begin and end within rows. What they look
// up adds up to what a lookup in the whole table gives, bit by bit, signs of
// zeros included.
TEST(EmbeddingTest, LookupsInPiecesAddUpToTheRows) {
  constexpr int64_t kPiece = 64, kRanks = 3, kPeriod = kRanks * kPiece;
  constexpr int64_t kRows = 70, kVocab = 11;
  const TestVector<int32_t> ids = Ids(kRows, kVocab);
  for (const int64_t width : {24, 31, 200}) {
    const int64_t laps = (kVocab * width + kPeriod - 1) / kPeriod;
    // Parts of the table are of whole rows.
    const int64_t cut = kPeriod % width == 0 ? kPeriod : 0;
    for (const DType dtype : kFloatTypes) {
      Array table = Array::Normal(dtype, laps * kPeriod, 1);
      for (int64_t i = 0; i < table.size(); i += 5) table.Set(i, -0.0);
      for (int64_t i = 0; i < table.size(); i += 7) table.Set(i, 0.0);
      ForEachPath([&](const Path& path) {
        Array want(dtype, kRows * width);
        EmbeddingForwardArgs args;
        args.ids = ids.data();
        args.table = table.matrix(kVocab, width, width);
        args.out = want.matrix(kRows, width, width);
        path.ops.EmbeddingForward(path.stream, args);
        std::vector<Array> outs(
            kRanks, Array::Normal(dtype, kRows * width, /*seed=*/2));
        std::vector<const void*> sources;
        for (int64_t rank = 0; rank < kRanks; ++rank) {
          Array stored(dtype, laps * kPiece);
          for (int64_t i = 0; i < stored.size(); ++i) {
            stored.Set(
                i, table[i / kPiece * kPeriod + rank * kPiece + i % kPiece]);
          }
          args.out = outs[rank].matrix(kRows, width, width);
          for (const auto& [first, last] :
               {std::pair<int64_t, int64_t>(0, cut), {cut, INT64_MAX}}) {
            args.table = stored.matrix(kVocab, width, width);
            args.table.data = static_cast<const char*>(args.table.data) +
                              first / kRanks * DTypeBytes(dtype);
            args.pieces = {kPeriod, rank * kPiece, kPiece, first, last};
            path.ops.EmbeddingForward(path.stream, args);
          }
          sources.push_back(outs[rank].data());
        }
        Array sum(dtype, kRows * width);
        path.ops.SumRanks(path.stream, {sources, dtype, sum.vector()});
        EXPECT_TRUE(sum.SameBits(want)) << DTypeName(dtype) << " " << width;
      });
    }
  }
}

void Backward(const Path& path, const EmbeddingBackwardArgs& args) {
  Scratch scratch(path.ops.EmbeddingBackwardWorkspaceBytes(args));
  path.ops.EmbeddingBackward(path.stream, args, scratch.workspace());
}

// The sum of fp32 rows in order of i, and for 16-bit tables in fp32 within
// each 4096 rows of dout, rounded once.
Array WantTable(const Case& c, const TestVector<int32_t>& ids,
                const Array& dout, const Array& before, bool accumulate) {
  const int64_t ld = c.width + c.extra;
  Array want = before;
  for (int64_t v = 0; v < c.vocab; ++v) {
    for (int64_t j = 0; j < c.width; ++j) {
      if (!accumulate) want.Set(v * ld + j, 0);
      float sum = static_cast<float>(want[v * ld + j]);
      for (int64_t i = 0; i < c.rows; ++i) {
        if (i % 4096 == 0) {
          want.Set(v * ld + j, sum);
          sum = static_cast<float>(want[v * ld + j]);
        }
        if (ids[i] == v) sum += static_cast<float>(dout[i * ld + j]);
      }
      want.Set(v * ld + j, sum);
    }
  }
  return want;
}

TEST(EmbeddingTest, BackwardSumsInOrderOnEveryPathAndThreadCount) {
  for (const DType dtype : kFloatTypes) {
    for (const DType table_dtype : {DType::kF32, dtype}) {
      for (const bool accumulate : {false, true}) {
        for (const Case& c : kCases) {
          const int64_t ld = c.width + c.extra;
          const TestVector<int32_t> ids = Ids(c.rows, c.vocab);
          Array dout = Array::Normal(dtype, c.rows * ld, 3);
          const Array before = Array::Normal(table_dtype, c.vocab * ld, 4);
          const Array want = WantTable(c, ids, dout, before, accumulate);
          ForEachPath([&](const Path& path) {
            Array dtable = before;
            Backward(path, {ids.data(), dout.matrix(c.rows, c.width, ld),
                            dtable.matrix(c.vocab, c.width, ld), accumulate});
            EXPECT_TRUE(dtable.SameBits(want))
                << DTypeName(dtype) << " -> " << DTypeName(table_dtype) << " "
                << c.rows << "x" << c.width;
          });
        }
      }
    }
  }
}

// A rank's part of a sharded table gets the same values as in the whole table,
// even if pieces begin and end within rows.
TEST(EmbeddingTest, PiecesOfATableGetTheirPartOfTheWhole) {
  constexpr int64_t kPiece = 64, kRanks = 3, kPeriod = kRanks * kPiece;
  for (const int64_t width : {24, 31, 200}) {
    constexpr int64_t kRows = 70, kVocab = 11;
    const int64_t laps = (kVocab * width + kPeriod - 1) / kPeriod;
    const TestVector<int32_t> ids = Ids(kRows, kVocab);
    for (const DType dtype : kFloatTypes) {
      for (const DType table_dtype : {DType::kF32, dtype}) {
        Array dout = Array::Normal(dtype, kRows * width, 3);
        const Array before = Array::Normal(table_dtype, laps * kPeriod, 4);
        ForEachPath([&](const Path& path) {
          EmbeddingBackwardArgs args{ids.data(),
                                     dout.matrix(kRows, width, width),
                                     {},
                                     /*accumulate=*/true};
          Array whole = before;
          args.dtable = whole.matrix(kVocab, width, width);
          Backward(path, args);
          for (int64_t rank = 0; rank < kRanks; ++rank) {
            Array piece(table_dtype, laps * kPiece), want = piece;
            for (int64_t i = 0; i < laps * kPiece; ++i) {
              const int64_t at =
                  i / kPiece * kPeriod + rank * kPiece + i % kPiece;
              piece.Set(i, before[at]);
              want.Set(i, whole[at]);
            }
            args.dtable = piece.matrix(kVocab, width, width);
            args.pieces = {kPeriod, rank * kPiece, kPiece};
            Backward(path, args);
            EXPECT_TRUE(piece.SameBits(want))
                << DTypeName(dtype) << " -> " << DTypeName(table_dtype) << " "
                << width << " rank " << rank;
            // A part of the table: laps 1 and on, up to an element.
            const int64_t last = (kVocab * width - width / 2) / 64 * 64;
            Array part(table_dtype, (laps - 1) * kPiece), of_part = part;
            for (int64_t i = 0; i < part.size(); ++i) {
              const int64_t at =
                  (i / kPiece + 1) * kPeriod + rank * kPiece + i % kPiece;
              part.Set(i, before[at]);
              of_part.Set(i, at < last ? whole[at] : before[at]);
            }
            args.dtable.data = part.matrix(1, kPiece, kPiece).data;
            args.pieces.first = kPeriod;
            args.pieces.last = last;
            Backward(path, args);
            EXPECT_TRUE(part.SameBits(of_part))
                << DTypeName(dtype) << " -> " << DTypeName(table_dtype) << " "
                << width << " rank " << rank << " part";
            args.pieces = {};
          }
        });
      }
    }
  }
}

// Tokens that fill much of a batch: more rows of one id than are summed at a
// time anywhere, in several runs, next to ids that occur once. Integers, so
// that every order of summation gives the same bits.
TEST(EmbeddingTest, HotTokensGetEveryRow) {
  constexpr int64_t kRows = 2600, kVocab = 40;
  TestVector<int32_t> ids(kRows);
  for (int64_t i = 0; i < kRows; ++i) {
    // 17 occurs in 256 + 1 rows, 18 in 256, 3 in more than 1000.
    ids[i] = static_cast<int32_t>(i < 257   ? 17
                                  : i < 513 ? 18
                                  : i % 2   ? 3
                                  : i % 32  ? 30
                                            : i % kVocab);
  }
  for (const int64_t width : {24, 37}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Array dout(dtype, kRows * width);
      std::mt19937_64 random(3);
      for (int64_t i = 0; i < dout.size(); ++i) {
        dout.Set(i, static_cast<double>(random() % 9) - 4);
      }
      Array before(dtype, kVocab * width);
      for (int64_t i = 0; i < before.size(); ++i) before.Set(i, i % 5);
      const Case c = {kRows, kVocab, width, 0};
      const Array want = WantTable(c, ids, dout, before, true);
      ForEachPath([&](const Path& path) {
        Array dtable = before;
        Backward(path, {ids.data(), dout.matrix(kRows, width, width),
                        dtable.matrix(kVocab, width, width), true});
        EXPECT_TRUE(dtable.SameBits(want)) << DTypeName(dtype) << " " << width;
      });
    }
  }
}

TEST(EmbeddingTest, SixteenBitTablesLoseNothingToManySmallTerms) {
  // 1 + 3000 times 2^-10 in bf16: each term alone would round away.
  ForEachPath([](const Path& path) {
    const TestVector<int32_t> ids(9000, 0);
    Array dout(DType::kBF16, 9000 * 3);
    for (int64_t i = 0; i < dout.size(); ++i) dout.Set(i, 0x1p-10);
    Array dtable(DType::kBF16, 3);
    for (int i = 0; i < 3; ++i) dtable.Set(i, 1);
    Backward(path, {ids.data(), dout.matrix(9000, 3, 3), dtable.matrix(1, 3, 3),
                    true});
    // 1 + 9000 / 1024 = 9.79, rounded three times to 8 bits.
    for (int i = 0; i < 3; ++i) EXPECT_NEAR(dtable[i], 9.79, 0.06);
  });
}

}  // namespace
}  // namespace zero
