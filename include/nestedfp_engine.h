/* libnestedfp_engine: a model ready to answer, for programs in other languages. What goes in and comes out beside text
 * is JSON, so that new fields break nobody; docs/python.md has the fields.
 *
 *   - Functions return NFP_OK (0) or another nfp_status (nestedfp.h); nfp_engine_last_error() has the message of the
 *     calling thread.
 *   - An engine may be used by several threads; their calls take turns. It computes during nfp_engine_step() only.
 *   - Texts that come back are UTF-8, end in zero, and are freed with nfp_engine_free(). */
#ifndef NESTEDFP_ENGINE_H
#define NESTEDFP_ENGINE_H

#include "nestedfp.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NFP_ENGINE_ABI_VERSION 2

typedef struct nfp_engine nfp_engine;

NFP_API int32_t nfp_engine_abi_version(void);
NFP_API const char* nfp_engine_last_error(void);
NFP_API void nfp_engine_free(char* text);

/* `model`: as every verb of the program takes it. `options`: a JSON object. Unknown fields and values out of range are
 * NFP_USAGE. Reads all weights. */
NFP_API nfp_status nfp_engine_open(const char* model, const char* options, nfp_engine** engine);
NFP_API void nfp_engine_close(nfp_engine* engine);
/* {"model", "device", "vocab_size", "max_model_len", "weight_bytes", "load_s", "policy", "default_sampling_params"}.
 * The last are what the model's generation_config.json recommends: a request has them only where it says so itself. */
NFP_API nfp_status nfp_engine_info(nfp_engine* engine, char** info);

/* Text -> {"ids": [...]}; ids (a JSON array) -> {"text"}, in which zeros may be. */
NFP_API nfp_status nfp_engine_encode(nfp_engine* engine, const char* text, size_t bytes, char** ids);
NFP_API nfp_status nfp_engine_decode(nfp_engine* engine, const char* ids, char** text);
/* {"messages": [...], "tools": [...], ...}, as the model's chat template takes them -> {"ids": [...]}. */
NFP_API nfp_status nfp_engine_apply_chat_template(nfp_engine* engine, const char* input, char** ids);

/* {"id", "prompt": [ids], sampling parameters, "precision": "auto", "exact" or "fast"}. The request waits until steps
 * are run. */
NFP_API nfp_status nfp_engine_submit(nfp_engine* engine, const char* request);
/* Ends a request; its last output comes with the next step. An unknown id is no error. */
NFP_API nfp_status nfp_engine_cancel(nfp_engine* engine, const char* id);
/* Runs one step: {"outputs": [{"id", "text", "tokens", "finish_reason", ...}], "idle": true once nothing is left}. With
 * speculative_tokens a request may have several outputs of one step, in the order of its tokens. */
NFP_API nfp_status nfp_engine_step(nfp_engine* engine, char** outputs);

#ifdef __cplusplus
}
#endif

#endif
