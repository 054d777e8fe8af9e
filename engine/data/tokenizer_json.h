// Hugging Face's tokenizer.json with byte-level BPE, as GPT-2, Llama 3 and Qwen
// have it:
//
//   added tokens (added_tokens.h) -> normal form (normalizer.h)
//     -> words (splitter.h) -> merges (bpe.h) -> ids
//
// Ids are those of the package `tokenizers`, in text of the characters that
// regex.h names; text that is not UTF-8 is read with U+FFFD in place of each
// wrong part. Truncation and padding in the file are not for training and not
// read. What stands in the file and is not known here is an error.
#ifndef ZERO_ENGINE_DATA_TOKENIZER_JSON_H_
#define ZERO_ENGINE_DATA_TOKENIZER_JSON_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/data/tokenizer.h"

namespace zero {

// The end of text is the eos_token of tokenizer_config.json or
// special_tokens_map.json beside `path`; without them the one of the well-known
// names that the tokenizer has.
// Errors: NotFound; InvalidArgument where the file is damaged, with the JSON
//         path; Unimplemented naming what is not read, with a remedy.
absl::StatusOr<std::unique_ptr<Tokenizer>> OpenTokenizerJson(
    const std::string& path);

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_TOKENIZER_JSON_H_
