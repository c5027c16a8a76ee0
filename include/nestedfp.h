/* libnestedfp: the nested weight format, the device's layout, the Hopper kernels, the precision policies and predicted
 * step times, for other engines. Plain C: pointers, sizes and a CUDA stream.
 *
 *   - Functions return NFP_OK (0) or another nfp_status; nfp_last_error() then has the message of the calling thread.
 *   - All functions are thread-safe unless they say otherwise. Nothing is kept of pointers that are passed in, except
 *     where a function says so.
 *   - Shapes are [rows, columns], row-major. A weight is W[n, k]: n output features, k input features.
 *   - "device" pointers, and streams, are of the device that was current at nfp_gpu_create(), whichever is current
 *     later. Functions that take a stream only enqueue: no allocation, no synchronisation, so that they can be captured
 *     in a CUDA graph. The stream alone orders them: another stream's work finds what one has written (planes of
 *     nfp_gpu_nest and nfp_gpu_pack, say) once it was made to wait for it, by an event or a synchronisation.
 *   - Structs begin with their size, so that later versions may add fields at their end.
 *
 * The format is described in docs/format.md. */
#ifndef NESTEDFP_H
#define NESTEDFP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define NFP_API __attribute__((visibility("default")))
#else
#define NFP_API
#endif

/* Grows when a caller that was compiled against an older header would break. */
#define NFP_ABI_VERSION 2

typedef enum nfp_status {
  NFP_OK = 0,
  NFP_INVALID_INPUT = 1, /* bytes from outside that break a rule */
  NFP_NOT_FOUND = 2,
  NFP_UNSUPPORTED = 3, /* understood, but not something that this build or device can do */
  NFP_IO = 4,
  NFP_RESOURCE = 5, /* memory is used up, or CUDA refused */
  NFP_USAGE = 6,    /* a wrong argument; the message names it */
  NFP_CANCELLED = 7,
  NFP_DEVICE = 8, /* the device failed and does not come back */
  NFP_INTERNAL = 9
} nfp_status;

NFP_API int32_t nfp_abi_version(void); /* of the library that was loaded */
NFP_API const char* nfp_version(void);
/* "cuda" where the library holds the Hopper kernels, else "cpu". */
NFP_API const char* nfp_build(void);
/* Why the last call of this thread that failed did so; one line, empty if none has. Valid until the next failure. */
NFP_API const char* nfp_last_error(void);

/* ---- Numbers ---------------------------------------------------------------------------------------------------- */

/* FP16 bits of |w| <= 1.75 <-> an upper byte (an E4M3 number, w * 2^8 rounded to nearest) and a lower byte.
 * NFP_INVALID_INPUT: some weight is larger; the message has its place. The arrays are [count]. */
NFP_API nfp_status nfp_split(const uint16_t* weights, size_t count, uint8_t* upper, uint8_t* lower);
NFP_API nfp_status nfp_join(const uint8_t* upper, const uint8_t* lower, size_t count, uint16_t* weights);

typedef enum nfp_type { NFP_F16 = 0, NFP_BF16 = 1 } nfp_type;

typedef struct nfp_matrix_report {
  size_t size;            /* sizeof(nfp_matrix_report), set by the caller */
  int32_t nests;          /* 1: every row has an exponent; 0: the matrix must stay dense */
  int32_t nests_by_paper; /* 1: every |w| <= 1.75, no exponent needed */
  float largest;          /* max |w| */
  int64_t largest_row;
  int64_t rows_shifted; /* rows with an exponent other than 0 */
  int64_t inexact;      /* BF16 weights that nesting (or, for a dense matrix, FP16) changes */
  float largest_error;  /* of these, max |change| */
  char reason[256];     /* why it does not nest; empty if it does */
} nfp_matrix_report;

/* Row exponents of W[rows, columns] (docs/format.md, "One row"), [rows]: row r is nested as FP16(w * 2^-exponents[r]).
 * `threads` of the host, up to 1024, share the rows; 0 = as many as the process may use. NaN, infinities:
 * NFP_INVALID_INPUT; a matrix of BF16 that neither nests nor is within FP16: NFP_UNSUPPORTED. */
NFP_API nfp_status nfp_analyse(const uint16_t* weights, int64_t rows, int64_t columns, nfp_type type, int32_t threads,
                               int8_t* exponents, nfp_matrix_report* report);
/* The bytes, once the matrix is known to nest: upper and lower are [rows, columns]. exponents may be NULL: all 0. */
NFP_API nfp_status nfp_nest(const uint16_t* weights, int64_t rows, int64_t columns, nfp_type type,
                            const int8_t* exponents, int32_t threads, uint8_t* upper, uint8_t* lower);
NFP_API nfp_status nfp_unnest(const uint8_t* upper, const uint8_t* lower, int64_t rows, int64_t columns, nfp_type type,
                              const int8_t* exponents, int32_t threads, uint16_t* weights);

/* ---- The device's layout ---------------------------------------------------------------------------------------- */

/* How FP16 is rebuilt. BIASED is faster; it needs uppers that are rounded to nearest wherever the lower byte's top bit
 * is set ("uppers" of a checkpoint's config.json: "nearest" or "restricted"). */
typedef enum nfp_join_kind { NFP_JOIN_BIASED = 0, NFP_JOIN_FREE = 1 } nfp_join_kind;
typedef enum nfp_plane { NFP_UPPER = 0, NFP_LOWER = 1 } nfp_plane;

/* Bytes of one plane of W[n, k] on the device; 0 where n or k is not positive, or both are too large. */
NFP_API size_t nfp_plane_bytes(int64_t n, int64_t k);
/* On the host: bytes[n, k] as nfp_nest() gives them -> packed[nfp_plane_bytes(n, k)]. */
NFP_API nfp_status nfp_pack(const uint8_t* bytes, int64_t n, int64_t k, nfp_plane plane, nfp_join_kind join,
                            int32_t threads, uint8_t* packed);

/* ---- The Hopper kernels ----------------------------------------------------------------------------------------- */

typedef struct nfp_gpu nfp_gpu;
typedef struct CUstream_st* nfp_stream; /* cudaStream_t */

/* For the current device, which must be of compute capability 9.0 (else NFP_UNSUPPORTED). Lives until destroyed. */
NFP_API nfp_status nfp_gpu_create(nfp_gpu** gpu);
NFP_API void nfp_gpu_destroy(nfp_gpu* gpu);
NFP_API const char* nfp_gpu_name(const nfp_gpu* gpu);
/* Kernels that `nestedfp tune` wrote to this file come before the built-in choices. Before the first call with the gpu
 * that runs one; not beside another call with it. NFP_INVALID_INPUT for a file that is none, or another GPU's. */
NFP_API nfp_status nfp_gpu_read_choices(nfp_gpu* gpu, const char* file);

/* Memory that the products of one stream share: device, 256-byte aligned, zero before the first product (which every
 * product leaves so). Parts of a product wait for each other: whatever workspaces they have, products of one stream at
 * a time may be under way on a device. */
NFP_API size_t nfp_gpu_workspace_bytes(void);

/* What nesting on the device found, written to device memory by nfp_gpu_nest. */
typedef struct nfp_gpu_report {
  int32_t bad_rows;        /* rows that do not nest: the planes are then without meaning */
  int32_t first_bad_row;   /* n if none */
  int32_t not_finite_rows; /* of bad_rows */
  int32_t rows_shifted;
  int64_t inexact;      /* BF16 weights that nesting changes */
  int64_t inexact_bf16; /* nested weights that are no BF16 numbers: NFP_BF16 products need 0 */
} nfp_gpu_report;

/* W[n, k] on the device (FP16 or BF16, ldw elements from row to row) -> both planes in the device's layout,
 * row_scale[n] (2^exponent) and the report (device). Finds the same exponents as nfp_analyse(). */
NFP_API nfp_status nfp_gpu_nest(nfp_gpu* gpu, const void* weights, int64_t ldw, int64_t n, int64_t k, nfp_type type,
                                nfp_join_kind join, uint8_t* upper, uint8_t* lower, float* row_scale,
                                nfp_gpu_report* report, nfp_stream stream);
/* bytes[n, k] on the device (as nfp_nest() gives them, or a slice of a nested checkpoint; ld bytes from row to row) ->
 * packed. */
NFP_API nfp_status nfp_gpu_pack(nfp_gpu* gpu, const uint8_t* bytes, int64_t ld, int64_t n, int64_t k, nfp_plane plane,
                                nfp_join_kind join, uint8_t* packed, nfp_stream stream);
/* Packed planes -> W[n, k] in `type`, ldw elements from row to row. row_scale may be NULL: all 1. */
NFP_API nfp_status nfp_gpu_unnest(nfp_gpu* gpu, const uint8_t* upper, const uint8_t* lower, const float* row_scale,
                                  int64_t n, int64_t k, nfp_join_kind join, nfp_type type, void* weights, int64_t ldw,
                                  nfp_stream stream);

typedef enum nfp_precision {
  NFP_PRECISION_FP16 = 0, /* both planes: exact weights, activations of x's type */
  NFP_PRECISION_FP8 = 1   /* upper plane: E4M3 weights, activations rounded to E4M3 with a scale a token */
} nfp_precision;

typedef struct nfp_weight {
  size_t size;            /* sizeof(nfp_weight) */
  const uint8_t* upper;   /* device, packed, 16-byte aligned */
  const uint8_t* lower;   /* device, likewise; NULL: only FP8 can be run */
  const float* row_scale; /* device [n]; NULL: all 1 */
  int64_t n;              /* n and k, and a product's m: 1 to 2^30 */
  int64_t k;
  nfp_join_kind join;
} nfp_weight;

/* A weight made ready to be multiplied: which kernel runs a number of tokens is chosen once and remembered. The
 * pointers of `weight` and `workspace` are kept, and `gpu`: all must outlive it. */
typedef struct nfp_linear nfp_linear;
NFP_API nfp_status nfp_linear_create(nfp_gpu* gpu, const nfp_weight* weight, void* workspace, size_t workspace_bytes,
                                     nfp_linear** linear);
NFP_API void nfp_linear_destroy(nfp_linear* linear);
/* By default the first kernel of a product may start while the kernel before it in the stream still runs (programmatic
 * dependent launch: it fetches weights meanwhile). 1: it starts when that one is done. Not beside a call with it. */
NFP_API void nfp_linear_set_independent_start(nfp_linear* linear, int32_t independent);
/* Bytes of `scratch` (device, 256-byte aligned) that m rows need in FP8: their E4M3 codes and scales. */
NFP_API size_t nfp_linear_scratch_bytes(const nfp_linear* linear, int64_t m);
/* y[m, n] = x[m, k] W^T + bias. x and y of `type`, ldx and ldy elements from row to row, x 16-byte aligned with rows of
 * a multiple of 16 bytes; bias: device FP32 [n] or NULL. Rows of more than nfp_max_quantised_columns() have no FP8 form
 * and run in FP16. Calls on one stream at a time for one workspace. */
NFP_API nfp_status nfp_linear_run(nfp_linear* linear, nfp_precision precision, nfp_type type, int64_t m, const void* x,
                                  int64_t ldx, void* y, int64_t ldy, const float* bias, void* scratch,
                                  nfp_stream stream);
/* y[m, n / 2] = silu(gate) * up, where x W^T holds both: blocks of 8 gate rows and 8 up rows alternate in W; n a
 * multiple of 16. What goes into silu is not rounded to `type` before. */
NFP_API nfp_status nfp_linear_run_swiglu(nfp_linear* linear, nfp_precision precision, nfp_type type, int64_t m,
                                         const void* x, int64_t ldx, void* y, int64_t ldy, void* scratch,
                                         nfp_stream stream);
/* A sum over the GPUs of a tensor-parallel group inside the norm that reads it (nfp_norm.all_reduce): each stores its
 * part of x into the others' memory and adds what they stored into its own, in the order of the ranks, with one
 * rounding to `type`. All ranks make the same calls in the same order, each on one stream at a time; who waits for a
 * rank that makes no call waits for ever. */
typedef struct nfp_all_reduce nfp_all_reduce;
/* Bytes of each rank's buffer, for calls of up to most_bytes: rows times k times 2. */
NFP_API size_t nfp_all_reduce_buffer_bytes(int32_t ranks, size_t most_bytes);
/* buffers: each rank's as this process sees it (device memory of `bytes`, 256-byte aligned, that outlives the calls),
 * own one included; that is cleared. No rank may make a call before all have created theirs. ranks: 2 to 8. */
NFP_API nfp_status nfp_all_reduce_create(nfp_gpu* gpu, int32_t rank, int32_t ranks, void* const* buffers, size_t bytes,
                                         nfp_all_reduce** all_reduce);
NFP_API void nfp_all_reduce_destroy(nfp_all_reduce* all_reduce);
/* The most rows of k columns that one call takes. */
NFP_API int64_t nfp_all_reduce_max_rows(const nfp_all_reduce* all_reduce, int64_t k);

/* The RMSNorm before a product: h = x + residual, rounded to `type`; what is multiplied is
 * h / sqrt(mean(h^2) + epsilon) * weight. */
typedef struct nfp_norm {
  size_t size;        /* sizeof(nfp_norm) */
  const void* weight; /* device [k] of `type` */
  float epsilon;
  const void* residual; /* device [m, k] of `type`, ldr elements from row to row; NULL: h = x */
  void* h;              /* [m, k], written, ldr too; may be residual. With a residual only */
  int64_t ldr;
  const nfp_all_reduce* all_reduce; /* x is this rank's part of a sum; NULL: it is whole. With a residual only */
} nfp_norm;
/* Bytes of `scratch` (device, 256-byte aligned) that m rows need behind a norm, in either precision. */
NFP_API size_t nfp_linear_norm_scratch_bytes(const nfp_linear* linear, int64_t m);
/* nfp_linear_run or, with `swiglu`, nfp_linear_run_swiglu (then without bias), of what the norm makes of x: two kernels
 * in either precision. NFP_UNSUPPORTED where k is no multiple of 8 or more than nfp_max_quantised_columns(). */
NFP_API nfp_status nfp_linear_run_norm(nfp_linear* linear, nfp_precision precision, nfp_type type, int64_t m,
                                       const void* x, int64_t ldx, const nfp_norm* norm, void* y, int64_t ldy,
                                       const float* bias, int32_t swiglu, void* scratch, nfp_stream stream);
NFP_API int64_t nfp_max_quantised_columns(void);
/* The kernel that such a call runs, for people: "m 16, n 4096, k 14336, f16: 128x16 c1 b1 split4 (tuned), ...". Writes
 * at most `bytes` with the closing zero. */
NFP_API nfp_status nfp_linear_describe(nfp_linear* linear, nfp_precision precision, nfp_type type, int64_t m,
                                       char* text, size_t bytes);

typedef enum nfp_mode { NFP_MODE_F16 = 0, NFP_MODE_BF16 = 1, NFP_MODE_E4M3 = 2, NFP_MODE_E4M3_PROMOTED = 3 } nfp_mode;
typedef enum nfp_output { NFP_OUT_F16 = 0, NFP_OUT_BF16 = 1, NFP_OUT_F32 = 2 } nfp_output;

/* One product in any mode and with every epilogue. Leading dimensions are elements from row to row. */
typedef struct nfp_gemm_call {
  size_t size; /* sizeof(nfp_gemm_call) */
  nfp_weight weight;
  nfp_mode mode;
  nfp_output output;
  int64_t m;
  /* Device [m, k] of the mode's type, 16-byte aligned; E4M3: rows of nfp_e4m3_row_bytes(k) as nfp_rows writes them. */
  const void* x;
  int64_t ldx;               /* its bytes a multiple of 16 */
  const float* token_scale;  /* E4M3 modes: device [m], x is worth code * scale; NULL = 1 */
  int32_t swiglu;            /* 1: d = silu(gate) * up, as of nfp_linear_run_swiglu; n a multiple of 16 */
  int32_t batch_invariant;   /* the same cuts of every sum whatever m is */
  int32_t independent_start; /* 1: no programmatic dependent launch */
  void* d;                   /* device [m, n], with swiglu [m, n / 2], of `output` */
  int64_t ldd;
  const float* bias;    /* device [n], added before swiglu; NULL = none */
  const void* residual; /* device, shape and type as d, added last in FP32; may be d; NULL = none */
  int64_t ldr;
  void* workspace; /* nfp_gpu_workspace_bytes() */
  size_t workspace_bytes;
} nfp_gemm_call;
/* Only enqueues; calls on one stream at a time for one workspace. */
NFP_API nfp_status nfp_gemm(nfp_gpu* gpu, const nfp_gemm_call* call, nfp_stream stream);

/* What stands around a product, one kernel: y = x, RMSNorm of x (+ residual), or silu(gate) * up; as 16 bits, as E4M3
 * with a scale a token, or both. Or E4M3 codes and scales that another quantiser made: its rows in order of k become
 * y_e4m3 as the products take it, its scales token_scale. */
typedef enum nfp_rows_source {
  NFP_ROWS_PLAIN = 0,
  NFP_ROWS_NORM = 1,
  NFP_ROWS_SWIGLU = 2, /* x: [m, 2 k], blocks of 8 gate columns and 8 up columns alternate; k a multiple of 8 */
  NFP_ROWS_E4M3 = 3    /* x: [m, k] E4M3 codes, any ldx from k; fastest 16-byte aligned, k and ldx multiples of 16 */
} nfp_rows_source;
typedef struct nfp_rows_call {
  size_t size; /* sizeof(nfp_rows_call) */
  nfp_rows_source source;
  nfp_type type; /* of x, weight, residual and y; not of E4M3 */
  int64_t m;
  int64_t k; /* columns of y: 1 to nfp_max_quantised_columns(), of E4M3 to 2^27 */
  const void* x;
  int64_t ldx;
  const void* weight; /* NORM: [k] of `type` */
  float epsilon;
  int32_t independent_start;
  void* residual; /* NORM: [m, k], read, and replaced by x + residual; NULL = none */
  int64_t ldr;
  void* y; /* [m, k] of `type`; NULL = not wanted, and with E4M3 */
  int64_t ldy;
  uint8_t* y_e4m3;    /* rows of nfp_e4m3_row_bytes(k), 16-byte aligned; NULL = not wanted. Not x */
  int64_t ldy_e4m3;   /* bytes from row to row, a multiple of 16 */
  float* token_scale; /* [m], with y_e4m3; with E4M3 NULL = not wanted (x_scale of each row is what products take) */
  /* A caller whose struct ends here has no E4M3. */
  const float* x_scale; /* E4M3: device, x is worth code * scale; [m], or with one_scale [1]. NULL: no token_scale */
  int32_t one_scale;
  /* A caller whose struct ends here has no sums over ranks. */
  void* h; /* NORM with a residual: [m, k], ldr from row to row, where x + residual goes; NULL: to residual */
  const nfp_all_reduce* all_reduce; /* NORM with a residual: as nfp_norm.all_reduce; NULL: x is whole */
} nfp_rows_call;
NFP_API nfp_status nfp_rows(nfp_gpu* gpu, const nfp_rows_call* call, nfp_stream stream);
NFP_API int64_t nfp_e4m3_row_bytes(int64_t k);

/* ---- Mixtures of experts ---------------------------------------------------------------------------------------- */

/* Device bytes of one expert's W[n, k]: its packed planes, first the upper and then the lower. An expert that does not
 * nest has n * k numbers of the activations' type there instead, row-major. */
NFP_API size_t nfp_expert_bytes(int64_t n, int64_t k);

/* The matrices W[n, k] of a layer's experts. */
typedef struct nfp_expert_stack {
  size_t size;            /* sizeof(nfp_expert_stack) */
  const uint8_t* bytes;   /* device, 16-byte aligned: nfp_expert_bytes(n, k) of each expert, one behind the other */
  const float* row_scale; /* device [experts, n], 1 in rows of those that do not nest; NULL: all 1 */
  const uint8_t* dense;   /* host [experts]: 1 where an expert does not nest; NULL: all do. Not kept */
  int64_t n;
  int64_t k;
  nfp_join_kind join;
} nfp_expert_stack;

typedef enum nfp_activation { NFP_SILU = 0, NFP_GELU_TANH = 1 } nfp_activation;

/* A layer's experts, made ready to be run. gate_up has 2 * intermediate rows of `hidden`, in which blocks of 8 gate
 * rows and 8 up rows alternate; down has `hidden` rows of intermediate. hidden and intermediate are multiples of 8; 1
 * to 512 experts. Device memory must outlive it. */
typedef struct nfp_experts nfp_experts;
NFP_API nfp_status nfp_experts_create(nfp_gpu* gpu, int32_t experts, const nfp_expert_stack* gate_up,
                                      const nfp_expert_stack* down, nfp_activation activation, nfp_experts** made);
NFP_API void nfp_experts_destroy(nfp_experts* experts);

/* y[r] = sum over i < top of weights[r, i] * down(activation(gate(x[r])) * up(x[r])) of expert ids[r, i], in the order
 * of i. Which and how many rows an expert has is known on the device only, so that a captured graph replays with any
 * routes. */
typedef struct nfp_experts_call {
  size_t size; /* sizeof(nfp_experts_call) */
  /* FP16: both planes. FP8: upper planes, E4M3 weights; where experts have many rows, and all of them nest, activations
   * are rounded to E4M3 too, with a scale a token. Experts that do not nest have one form. */
  nfp_precision precision;
  nfp_type type; /* of x and y. BF16 needs nested weights that are BF16 numbers (nfp_gpu_report's inexact_bf16) */
  int64_t rows;
  int32_t top;          /* 1 to 32 */
  const void* x;        /* device [rows, hidden], 16-byte aligned */
  const int32_t* ids;   /* device [rows, top] */
  const float* weights; /* device [rows, top] */
  /* Expert parallelism: device [map_size], of each id its expert here, or a negative number: of another GPU. NULL: ids
   * are experts. Ids that name no expert here count nothing. */
  const int32_t* map;
  int32_t map_size;
  void* y;       /* device [rows, hidden], 16-byte aligned */
  void* scratch; /* device, 256-byte aligned, nfp_experts_scratch_bytes(); free again once the call is done */
  size_t scratch_bytes;
} nfp_experts_call;
NFP_API size_t nfp_experts_scratch_bytes(const nfp_experts* experts, int64_t rows, int32_t top);
NFP_API nfp_status nfp_experts_run(nfp_experts* experts, const nfp_experts_call* call, nfp_stream stream);

/* ---- Attention over a paged KV cache ----------------------------------------------------------------------------- */

typedef enum nfp_kv_type { NFP_KV_F16 = 0, NFP_KV_E4M3 = 1, NFP_KV_BF16 = 2 } nfp_kv_type;

/* Causal attention of a ragged batch. A sequence's query tokens are the last ones of its context, whose keys and
 * values, these tokens' included, are in the cache. Queries and outputs are BF16 over a BF16 cache, else FP16. Sums and
 * softmax are FP32; the weights are rounded to that type for the product with the values. Shapes are in head_dim
 * numbers; all arrays are the device's. */
typedef struct nfp_attention_call {
  size_t size;   /* sizeof(nfp_attention_call) */
  int32_t heads; /* 1 to 16 times kv_heads */
  int32_t kv_heads;
  int32_t head_dim; /* a multiple of 16 up to 256 */
  float scale;      /* of q k^T, positive */
  float soft_cap;   /* scores become soft_cap * tanh(score / soft_cap); 0: as they are. Not negative */
  int32_t window;   /* a query at position p sees keys from p - window + 1 on; 0: from 0 */
  /* The cache: keys and values are [blocks, kv_heads, block_size, head_dim] each, 16-byte aligned. */
  nfp_kv_type kv_type;
  float key_scale; /* E4M3: a number is worth code * scale */
  float value_scale;
  int32_t block_size; /* 16, 32 or 64 */
  int64_t blocks;
  int64_t block_stride; /* numbers from a block to the next, a multiple of block_size * head_dim; 0: as they are full */
  const void* keys;
  const void* values;
  const void* q;    /* [tokens, q_stride], a token's heads first; 16-byte aligned */
  int64_t q_stride; /* a multiple of 8 */
  void* out;        /* [tokens, heads * head_dim], 4-byte aligned */
  /* With cos_sin, rows of q have a token's keys and values behind its queries, as their product left them: q_stride is
   * (heads + 2 * kv_heads) * head_dim. Queries and keys are rotated (feature i with i + head_dim / 2), queries perhaps
   * in place, and keys and values are written to the cache before it is read. E4M3's scales are 1. */
  const float* cos_sin; /* [positions, head_dim], 16-byte aligned: head_dim / 2 cosines, then as many sines; or NULL */
  const float* q_norm;  /* [head_dim], 16-byte aligned: weights of an RMSNorm of each head before that; or NULL */
  const float* k_norm;
  float norm_epsilon;
  /* Over all sequences of the batch: the call is for `sequences` of them, from first_sequence on. */
  const int32_t* query_start; /* [sequences + 1]: a sequence's first query token */
  const int32_t* context;     /* tokens; 0 pads a decode call, whose output there is zeros */
  const int32_t* block_table; /* [sequences, table_width] */
  int32_t table_width;
  int32_t first_sequence;
  int32_t sequences; /* times kv_heads at most nfp_max_attention_rows() */
  int32_t tokens;    /* prefill: query tokens of these sequences, or more */
  /* Decode: the longest context, as far as it is known, else 0: sizes the launch of few sequences. Any works. */
  int32_t likely_context;
  int32_t deterministic;     /* decode: sums do not depend on the batch; prefill's never do */
  int32_t independent_start; /* 1: no programmatic dependent launch */
  void* workspace;           /* 16-byte aligned, zero before its first call, which each call leaves fit for the next */
  size_t workspace_bytes;
} nfp_attention_call;
/* The most sequences times kv_heads of a call. */
NFP_API int64_t nfp_max_attention_rows(void);
/* Bytes of workspace for decode and prefill calls like this one, and those with fewer sequences. Of `call` the shape
 * counts (heads, kv_heads, head_dim), kv_type, sequences and deterministic. */
NFP_API nfp_status nfp_attention_workspace_bytes(nfp_gpu* gpu, const nfp_attention_call* call, size_t* bytes);
/* A kernel, which finds out on the device what there is to do (a captured graph replays with any contexts), and where a
 * rotation is no part of it one more. Calls on one stream at a time for one workspace. decode: one query token a
 * sequence. prefill: any number; with a rotation these sequences have `tokens` query tokens, or fewer. append: the
 * rotation alone, of queries in place, for any block_size; with `tokens` = 0 of one token a sequence. */
NFP_API nfp_status nfp_attention_decode(nfp_gpu* gpu, const nfp_attention_call* call, nfp_stream stream);
NFP_API nfp_status nfp_attention_prefill(nfp_gpu* gpu, const nfp_attention_call* call, nfp_stream stream);
NFP_API nfp_status nfp_attention_append(nfp_gpu* gpu, const nfp_attention_call* call, nfp_stream stream);

/* ---- Precision policies ----------------------------------------------------------------------------------------- */

/* What a policy may know about the step that is about to run (docs/serving.md has the policies). */
typedef struct nfp_step_load {
  size_t size; /* sizeof(nfp_step_load) */
  int32_t step_tokens;
  int32_t prefill_tokens; /* of these, tokens of prompts */
  int32_t running;        /* sequences in the step */
  int32_t waiting;        /* requests not yet admitted */
  double kv_use;          /* share of KV blocks in use, 0..1 */
  double recent_tpot_s;   /* 0 = none yet */
  double recent_ttft_s;
  uint64_t step_index;
} nfp_step_load;

typedef struct nfp_policy nfp_policy;
/* "fp16", "fp8-w8a8", "threshold:TOKENS", "alternate:STEPS". NFP_USAGE: the message lists what there is. One thread at
 * a time. */
NFP_API nfp_status nfp_policy_create(const char* text, nfp_policy** policy);
NFP_API void nfp_policy_destroy(nfp_policy* policy);
NFP_API nfp_status nfp_policy_choose(nfp_policy* policy, const nfp_step_load* load, nfp_precision* precision);

/* ---- Step times ------------------------------------------------------------------------------------------------- */

/* Predicts how long a step takes, from a table that `nestedfp bench MODEL steps` wrote (docs/step-times.md). Never
 * changes once it is made: any number of threads may ask it at a time. */
typedef struct nfp_step_model nfp_step_model;
/* NFP_NOT_FOUND, NFP_IO: the file cannot be read. NFP_INVALID_INPUT: it is no such table, or too small to predict
 * from; the message names file and field. */
NFP_API nfp_status nfp_step_model_load(const char* file, nfp_step_model** model);
NFP_API void nfp_step_model_destroy(nfp_step_model* model);

/* What the linear layers of a step are computed in: 0 .. nfp_step_model_levels() - 1, in the table's order. */
typedef struct nfp_step_level {
  size_t size;             /* sizeof(nfp_step_level), set by the caller */
  char name[32];           /* "fp16", "fp8-w8a8", "fp8-w8a8@0.50" */
  nfp_precision precision; /* FP8 of any kind */
  double fp8_share;        /* of the weights that are computed in FP8: 0 in FP16, else up to 1 */
} nfp_step_level;
NFP_API int32_t nfp_step_model_levels(const nfp_step_model* model);
NFP_API nfp_status nfp_step_model_level(const nfp_step_model* model, int32_t level, nfp_step_level* found);

/* A step: tokens[s] of each sequence (1: it is decoded; more: a chunk of its prompt) behind contexts[s] that are in the
 * KV cache already. */
typedef struct nfp_step_work {
  size_t size; /* sizeof(nfp_step_work) */
  int32_t sequences;
  /* 1: two launches, the sequences of one token in FP16, then the chunks at the level asked for */
  int32_t exact_singles;
  const int32_t* tokens;   /* [sequences] */
  const int32_t* contexts; /* [sequences] */
} nfp_step_work;
NFP_API nfp_status nfp_step_model_seconds(const nfp_step_model* model, int32_t level, const nfp_step_work* work,
                                          double* seconds);

#ifdef __cplusplus
}
#endif

#endif
