// Hugging Face's tokenizer.json with byte-level BPE, as in GPT-2, Llama 3 and
// Qwen:
//
//   added tokens (added_tokens.h) -> normal form (normalizer.h)
//     -> words (splitter.h) -> merges (bpe.h) -> ids
//
// Gives the ids of the package `tokenizers`, for characters up to Unicode 14
// (regex.h); ill-formed UTF-8 is read as U+FFFD, part by part. The file's
// truncation and padding are ignored; any other unsupported setting is an
// error.
#ifndef ZERO_ENGINE_DATA_TOKENIZER_JSON_H_
#define ZERO_ENGINE_DATA_TOKENIZER_JSON_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/data/tokenizer.h"

namespace zero {

// The end of text is the eos_token of tokenizer_config.json or
// special_tokens_map.json in the same folder; without these, the token with the
// name <|endoftext|>, <|end_of_text|> or </s>.
// Errors: NotFound; InvalidArgument if the file is damaged, with the JSON path;
//         Unimplemented naming the unsupported part, with a remedy.
absl::StatusOr<std::unique_ptr<Tokenizer>> OpenTokenizerJson(
    const std::string& path);

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_TOKENIZER_JSON_H_
