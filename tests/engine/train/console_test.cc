#include "engine/train/console.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "engine/train/metrics.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

// What a console printed.
std::string Printed(bool is_terminal,
                    const std::function<void(Console&)>& print) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* file = open_memstream(&text, &size);
  {
    Console console(file, is_terminal);
    print(console);
  }
  std::fclose(file);
  std::string result(text, size);
  std::free(text);
  return result;
}

TEST(ConsoleTest, OffATerminalOnlyKeptLinesArePrinted) {
  EXPECT_EQ(Printed(false,
                    [](Console& c) {
                      c.Progress("step 1", true);
                      c.Progress("step 2", false);
                      c.Progress("step 3", true);
                      c.Line("done");
                    }),
            "step 1\nstep 3\ndone\n");
}

TEST(ConsoleTest, RowsAreNamedBesideTheFormulaThatLacksThem) {
  EXPECT_EQ(AgainstFormula(5000, 5000), " = ZeRO's formula");
  EXPECT_EQ(AgainstFormula(4000, 5000),
            " = ZeRO's formula 5,000 - 1,000 of units that stayed in place");
  EXPECT_EQ(
      AgainstFormula(5000, 5000, 1200),
      " = ZeRO's formula 3,800 + 1,200 of embedding rows (not in the formula)");
  EXPECT_EQ(
      AgainstFormula(4500, 5000, 1200),
      " = ZeRO's formula 3,800 + 1,200 of embedding rows (not in the formula) "
      "- 500 of units that stayed in place");
}

TEST(ConsoleTest, OneThingIsNoPluralAndShortTimesAreNotZero) {
  EXPECT_EQ(Counted(1, "thread"), "1 thread");
  EXPECT_EQ(Counted(0, "file"), "0 files");
  EXPECT_EQ(Counted(1200, "file"), "1,200 files");
  EXPECT_EQ(HumanSeconds(0), "0 s");
  EXPECT_EQ(HumanSeconds(0.31), "0.3 s");
  EXPECT_EQ(HumanSeconds(0.042), "0.04 s");
  EXPECT_EQ(HumanSeconds(0.97), "1 s");
}

TEST(ConsoleTest, OnATerminalTheProgressLineRewritesItself) {
  EXPECT_EQ(Printed(true,
                    [](Console& c) {
                      c.Progress("step 100", false);
                      c.Progress("step 2", false);
                      c.Line("note");
                      c.Progress("step 3", true);
                      c.Line("done");
                    }),
            "\rstep 100\x1b[K\rstep 2\x1b[K\nnote\n\rstep 3\x1b[K\ndone\n");
}

TEST(ConsoleTest, TextEndsTheProgressLineAndIsPrintable) {
  EXPECT_EQ(Printed(true,
                    [](Console& c) {
                      c.Progress("p", false);
                      c.Text("100 % of %s");
                      c.Text(absl::string_view("\0x\x1b\n\t\x7f", 6));
                      c.Text("\u00e9");
                    }),
            "\rp\x1b[K\n100 % of %s\ufffdx\ufffd\n\t\ufffd\u00e9");
}

TEST(ConsoleTest, TablesAlignTheirSecondColumn) {
  EXPECT_EQ(Printed(false,
                    [](Console& c) {
                      c.Table("run", {{"a", "1"}, {"long", "2"}});
                    }),
            "run\n  a     1\n  long  2\n");
}

TEST(ConsoleTest, CountsBytesAndSecondsReadWell) {
  EXPECT_EQ(HumanCount(9999), "9999");
  EXPECT_EQ(HumanCount(12345), "12.3 k");
  EXPECT_EQ(HumanCount(124.4e6), "124.4 M");
  EXPECT_EQ(HumanCount(1.24e9), "1.24 B");
  EXPECT_EQ(HumanBytes(512), "0.5 KiB");
  EXPECT_EQ(HumanBytes(512.0 * 1024 * 1024), "512.0 MiB");
  EXPECT_EQ(HumanBytes(1.95 * 1024 * 1024 * 1024), "1.95 GiB");
  EXPECT_EQ(HumanBytesUp(512.0 * 1024 * 1024), "512.0 MiB");
  EXPECT_EQ(HumanBytesUp(512.0 * 1024 * 1024 + 1), "512.1 MiB");
  EXPECT_EQ(HumanBytesUp(1023.99 * 1024 * 1024), "1.00 GiB");
  EXPECT_EQ(HumanBytesUp(1.25 * 1024 * 1024 * 1024 + 1), "1.26 GiB");
  EXPECT_EQ(HumanBytesUp(513), "0.6 KiB");
  EXPECT_EQ(HumanBytesDown(1.5 * 1024 * 1024 * 1024 - 2), "1.49 GiB");
  EXPECT_EQ(HumanBytesDown(1.5 * 1024 * 1024 * 1024), "1.50 GiB");
  EXPECT_EQ(HumanBytesDown(std::floor(1.2 * 1024 * 1024 * 1024)), "1.20 GiB");
  EXPECT_EQ(HumanBytesDown(150.0 * 1024 * 1024), "150.0 MiB");
  EXPECT_EQ(HumanBytesDown(150.0 * 1024 * 1024 - 2), "149.9 MiB");
  EXPECT_EQ(HumanBytesDown(0), "0.0 KiB");
  EXPECT_EQ(HumanSeconds(0.2), "0.2 s");
  EXPECT_EQ(HumanSeconds(59.7), "1 min 00 s");
  EXPECT_EQ(HumanSeconds(724), "12 min 04 s");
  EXPECT_EQ(HumanSeconds(7500), "2 h 05 min");
  EXPECT_EQ(WithCommas(0), "0");
  EXPECT_EQ(WithCommas(999), "999");
  EXPECT_EQ(WithCommas(1115394), "1,115,394");
  EXPECT_EQ(WithCommas(-1000), "-1,000");
}

TEST(MetricsTest, DoublesReadBackToTheSameBits) {
  const double values[] = {0.1,
                           1.0 / 3,
                           -0.0,
                           5e-324,
                           std::numeric_limits<double>::max(),
                           double{0.1f},
                           4.1588830833596715,
                           1e300 * 1.0000000000000002};
  for (double value : values) {
    const std::string text = ToLine({{"x", value}});
    const double back = nlohmann::json::parse(text)["x"].get<double>();
    EXPECT_EQ(std::memcmp(&back, &value, sizeof(value)), 0) << text;
  }
}

TEST(MetricsTest, NumbersThatJsonHasNotBecomeNull) {
  EXPECT_EQ(
      ToLine({{"nan", std::nan("")}, {"inf", HUGE_VAL}, {"minus", -HUGE_VAL}}),
      R"({"nan":null,"inf":null,"minus":null})");
}

TEST(MetricsTest, NastyStringsAreValidJson) {
  const std::string nasty = "a \"quote\" \\ and\nlines\t\x01 \xc3\xa9";
  EXPECT_EQ(nlohmann::json::parse(ToLine({{"text", nasty}}))["text"], nasty);
  EXPECT_EQ(ToLine({{"text", "cut \xc3"}}), "{\"text\":\"cut \xef\xbf\xbd\"}");
}

TEST(MetricsTest, PeakBytesNamesWhatWasUsed) {
  MemoryLedger ledger;
  ledger.Add(MemoryCategory::kParameters, 100);
  ledger.Add(MemoryCategory::kActivations, 7);
  ledger.Remove(MemoryCategory::kActivations, 7);
  EXPECT_EQ(ToLine(PeakBytes(ledger)),
            R"({"parameters":100,"activations":7,"total":107})");
}

TEST(MetricsTest, EveryLineIsOnDiskAtOnceAndANewRunReplacesTheFile) {
  TempDir dir;
  dir.Write("m.jsonl", "of an earlier run\n");
  auto writer = MetricsWriter::Create(dir.File("m.jsonl"));
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_EQ(dir.Read("m.jsonl"), "");
  ASSERT_TRUE((*writer)->Write({{"step", 1}}).ok());
  EXPECT_EQ(dir.Read("m.jsonl"), "{\"step\":1}\n");
  ASSERT_TRUE((*writer)->Write({{"step", 2}}).ok());
  EXPECT_EQ(dir.Read("m.jsonl"), "{\"step\":1}\n{\"step\":2}\n");
}

TEST(MetricsTest, AFullDiskIsAnErrorWithThePath) {
  auto writer = MetricsWriter::Create("/dev/full");
  ASSERT_TRUE(writer.ok()) << writer.status();
  const absl::Status status = (*writer)->Write({{"step", 1}});
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("/dev/full"), absl::string_view::npos);
  EXPECT_FALSE(MetricsWriter::Create("/nonexistent/m.jsonl").ok());
}

}  // namespace
}  // namespace zero
