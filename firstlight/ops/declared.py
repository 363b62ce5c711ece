"""The list of operators: one declaration each, no torch. Reference and cases are in the file of the same name.

Letters: T packed tokens, N sequences of the batch, S slots or blocks of a pool, B rows per block, W window, D I O widths,
H heads, J key heads (each shared by H / J heads), K key width, V value width, R rotary width, L latent width, E experts,
X chosen experts, F G blocks of rows and columns that share a scale, M sources or cached rows, U rows chosen of them.
Sequence n owns packed tokens starts[n] to starts[n+1]; contexts[n] counts its tokens computed before: 0 means that its state
and window are zero whatever the slot holds.
"""

from __future__ import annotations

from firstlight.ops.registry import Tolerance, declare

_SMALL = Tolerance(float32=1e-5, bfloat16=2e-2)
_WIDE = Tolerance(float32=5e-5, bfloat16=3e-2)
_EXACT = Tolerance(float32=0.0, bfloat16=0.0)

rms_norm = declare(
    "rms_norm", "Divide by the root mean square (fp32), cast back, then multiply by the weight.",
    "(x_TD, weight_D, *, eps, plus_one=False) -> y_TD", tol=_SMALL)
layer_norm = declare(
    "layer_norm", "Subtract the mean, divide by the standard deviation, scale and shift: all in fp32, cast once.",
    "(x_TD, weight_D, bias_D, *, eps) -> y_TD", tol=_SMALL)
gated_rms_norm = declare(
    "gated_rms_norm", "RMS norm over the last dim times an activated gate, all in fp32, cast once.",
    "(x_THV, gate_THV, weight_V, *, eps, activation='sigmoid') -> y_THV", tol=_SMALL)
linear = declare(
    "linear", "Matrix product with a weight in checkpoint layout [out, in].",
    "(x_TI, weight_OI, bias_O=None) -> y_TO", tol=_WIDE)
activation = declare(
    "activation", "Gated activation of a feed-forward: SiLU or SiTU (bounded by two tanh), fp32 inside.",
    "(gate_TI, up_TI, *, kind, beta=1.0, linear_beta=None) -> y_TI", tol=_SMALL)
rope = declare(
    "rope", "Rotate pairs of channels by position: interleaved or half-split pairs.",
    "(x_THR, positions_T, inv_freq, *, interleaved, scale=1.0) -> y_THR", tol=_SMALL)
short_conv = declare(
    "short_conv", "Causal depthwise convolution and SiLU over packed sequences, with the window carried in a slot.",
    "(x_TD, weight_DW, window_SWD, slots_N, starts_N1, contexts_N) -> y_TD", tol=_SMALL, mutates=("window_SWD",))
decay_gate = declare(
    "decay_gate", "Log decay of the delta rule: lower_bound * sigmoid(exp(A)(f + b)), or -exp(A) softplus(f + b). fp32.",
    "(f_THK, a_log_H, dt_bias_HK, *, lower_bound=None) -> g_THK", tol=_SMALL)
gated_delta = declare(
    "gated_delta", "Gated delta rule over packed sequences; decay per channel (KDA) or per head (GDN), state [H, K, V] fp32 in a slot.",
    "(q_THK, k_THK, v_THV, g_THK, beta_TH, state_SHKV, slots_N, starts_N1, contexts_N, *, scale, norm_eps=None) -> o_THV",
    tol=_WIDE, mutates=("state_SHKV",))
latent_attention = declare(
    "latent_attention", "Causal attention whose keys and values are expanded from one cached latent row per token, over paged rows.",
    "(q_THQ, rows_SBC, tables_NB, kv_b_OL, starts_N1, contexts_N, *, nope, v_dim, scale) -> o_THV", tol=_WIDE)
index_scores = declare(
    "index_scores", "Lightning indexer: per row, the weighted sum over heads of ReLU(query . key), fp32; rows after a token's own are -inf.",
    "(q_THK, weights_TH, keys_SBK, tables_NB, starts_N1, contexts_N, *, scale) -> scores_TM", tol=_WIDE)
index_topk = declare(
    "index_topk", "The rows of the largest scores among each token's first `visible`, ascending, int32, -1 behind them; of equal ones the first.",
    "(scores_TM, visible_T, *, top_k) -> rows_TU", tol=_EXACT)
sparse_attention = declare(
    "sparse_attention", "Latent attention of each token over the rows that were chosen for it (-1: none); without any it is 0.",
    "(q_THQ, rows_SBC, tables_NB, kv_b_OL, chosen_TU, starts_N1, contexts_N, *, nope, v_dim, scale) -> o_THV", tol=_WIDE)
grouped_attention = declare(
    "grouped_attention", "Causal attention whose heads share key heads in groups (as many of them: plain; one: multi-query), over paged rows.",
    "(q_THK, keys_SBJK, values_SBJV, tables_NB, starts_N1, contexts_N, *, scale) -> o_THV", tol=_WIDE)
block_residual = declare(
    "block_residual", "Attention Residuals: softmax mix of block snapshots and the running prefix, scored in fp32.",
    "(sources_MTD, norm_D, proj_D, *, eps) -> x_TD", tol=_SMALL)
route = declare(
    "route", "Choose experts: fp32 scores, biased choice within groups, unbiased weights; ties go to the lowest index.",
    "(x_TD, weight_ED, bias_E=None, *, top_k, score, num_groups=1, top_groups=1, renormalize=True, scale=1.0) -> weights_TX, ids_TX",
    tol=_SMALL)
experts = declare(
    "experts", "Feed-forward of the chosen experts, grouped by expert, in any weight format; fp32 combine, cast once.",
    "(x_TD, bank, ids_TX, weights_TX, *, kind, beta=1.0, linear_beta=None) -> y_TD", tol=_WIDE)
mxfp4_unpack = declare(
    "mxfp4_unpack", "E2M1 nibbles (low nibble = even column) times E8M0 scales of 32 columns each.",
    "(packed_OI2, scale_OG) -> w_OI", tol=_EXACT)
fp8_unpack = declare(
    "fp8_unpack", "E4M3 codes times one fp32 scale per block of 128 x 128; blocks at the edges may be smaller.",
    "(codes_OI, scale_FG) -> w_OI", tol=_EXACT)
