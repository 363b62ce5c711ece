// The two recurrences that autograd would run token by token: short convolution with SiLU, and the gated delta rule.
//
// Letters: B rows, T tokens of a row, C channels, H heads, N = 32 channels of a head. Heads are 32 wide: a state is 4 KiB and stays in L1.

#include <torch/extension.h>

#include <cmath>
#include <vector>

namespace {

constexpr int N = 32;        // width of a head, keys and values alike
constexpr int TAPS = 4;      // of the short convolution
constexpr int SEGMENT = 16;  // tokens between two kept states
constexpr float EPS = 1e-6f;

// Unit length over the head; gives the factor.
inline float unit(const float* x, float* y) {
  float total = 0;
  for (int i = 0; i < N; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total + EPS);
  for (int i = 0; i < N; ++i) y[i] = x[i] * factor;
  return factor;
}

// Gradient of `unit`, added to dx.
inline void unit_back(const float* y, float factor, const float* dy, float* dx) {
  float along = 0;
  for (int i = 0; i < N; ++i) along += dy[i] * y[i];
  for (int i = 0; i < N; ++i) dx[i] = factor * (dy[i] - y[i] * along);
}

// One token: the state decays, moves towards v at k. `write` becomes beta * (v - k^T S).
inline void advance(const float* before, float* after, const float* k, const float* v, const float* a, float beta, float* write) {
  float found[N] = {0};
  for (int i = 0; i < N; ++i) {
    const float decayed_k = a[i] * k[i];
    for (int j = 0; j < N; ++j) found[j] += decayed_k * before[i * N + j];
  }
  for (int j = 0; j < N; ++j) write[j] = beta * (v[j] - found[j]);
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < N; ++j) after[i * N + j] = a[i] * before[i * N + j] + k[i] * write[j];
}

inline void read(const float* S, const float* q, float scale, float* o) {
  float sum[N] = {0};
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < N; ++j) sum[j] += q[i] * S[i * N + j];
  for (int j = 0; j < N; ++j) o[j] = scale * sum[j];
}

void check(const torch::Tensor& x) { TORCH_CHECK(x.is_contiguous() && x.scalar_type() == torch::kFloat, "contiguous fp32 is needed"); }

}  // namespace

// qkv [B, T, 3, H, N], a [B, T, H, N], beta [B, T, H], S0 [B, H, N, N] -> o [B, T, H, N], last state, kept states.
std::vector<torch::Tensor> delta_forward(torch::Tensor qkv, torch::Tensor a, torch::Tensor beta, torch::Tensor S0, double scale) {
  for (const auto& x : {qkv, a, beta, S0}) check(x);
  const int64_t B = qkv.size(0), T = qkv.size(1), H = qkv.size(3), num_kept = (T + SEGMENT - 1) / SEGMENT;
  auto o = torch::empty({B, T, H, N}, a.options());
  auto last = S0.clone();
  auto kept = torch::empty({B, H, num_kept, N, N}, a.options());
  const float *x = qkv.data_ptr<float>(), *pa = a.data_ptr<float>(), *pb = beta.data_ptr<float>();
  float *po = o.data_ptr<float>(), *pl = last.data_ptr<float>(), *pk = kept.data_ptr<float>();
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h) {
      float S[N * N], q[N], k[N], write[N];
      std::copy_n(pl + (b * H + h) * N * N, N * N, S);
      for (int64_t t = 0; t < T; ++t) {
        const int64_t row = b * T + t;
        if (t % SEGMENT == 0) std::copy_n(S, N * N, pk + ((b * H + h) * num_kept + t / SEGMENT) * N * N);
        const float* in = x + (row * 3 * H + h) * N;
        unit(in, q);
        unit(in + H * N, k);
        advance(S, S, k, in + 2 * H * N, pa + (row * H + h) * N, pb[row * H + h], write);
        read(S, q, scale, po + (row * H + h) * N);
      }
      std::copy_n(S, N * N, pl + (b * H + h) * N * N);
    }
  return {o, last, kept};
}

namespace {

// What one token needs again on the way back.
struct Token {
  float q[N], k[N], write[N], q_factor, k_factor;
};

struct Grads {
  float dq[N], dk[N], dv[N], da[N], dbeta;
};

// dS is the gradient of the state after the token; it becomes that of the state before.
void token_back(
    const Token& token, const float* before, const float* after, const float* a, float beta, float scale, const float* go, float* dS, Grads& g) {
  float d_write[N] = {0}, d_out[N], miss[N];
  for (int j = 0; j < N; ++j) d_out[j] = scale * go[j];
  for (int i = 0; i < N; ++i) {
    float read = 0, wrote = 0;
    float* row = dS + i * N;
    const float* state = after + i * N;
    for (int j = 0; j < N; ++j) {
      read += state[j] * d_out[j];
      row[j] += token.q[i] * d_out[j];
      d_write[j] += token.k[i] * row[j];
      wrote += row[j] * token.write[j];
    }
    g.dq[i] = read;
    g.dk[i] = wrote;
  }
  float along = 0;
  for (int j = 0; j < N; ++j) {
    along += d_write[j] * token.write[j];
    miss[j] = beta * d_write[j];
    g.dv[j] = miss[j];
  }
  g.dbeta = along / beta;  // beta is a sigmoid: never zero
  for (int i = 0; i < N; ++i) {
    float decayed = 0, moved = 0;
    float* row = dS + i * N;
    const float* state = before + i * N;
    for (int j = 0; j < N; ++j) {
      moved += state[j] * miss[j];
      const float d = row[j] - token.k[i] * miss[j];
      decayed += d * state[j];
      row[j] = a[i] * d;
    }
    g.dk[i] -= a[i] * moved;
    g.da[i] = decayed;
  }
}

}  // namespace

// Gradients of qkv, a and beta; the state that came in is a constant.
std::vector<torch::Tensor> delta_backward(
    torch::Tensor qkv, torch::Tensor a, torch::Tensor beta, torch::Tensor kept, torch::Tensor go, double scale) {
  for (const auto& x : {qkv, a, beta, kept, go}) check(x);
  const int64_t B = qkv.size(0), T = qkv.size(1), H = qkv.size(3), num_kept = kept.size(2);
  auto d_qkv = torch::empty_like(qkv), d_a = torch::empty_like(a), d_beta = torch::empty_like(beta);
  const float *x = qkv.data_ptr<float>(), *pa = a.data_ptr<float>(), *pb = beta.data_ptr<float>(), *pg = go.data_ptr<float>();
  const float* pk = kept.data_ptr<float>();
  float *dx = d_qkv.data_ptr<float>(), *da = d_a.data_ptr<float>(), *db = d_beta.data_ptr<float>();
  std::vector<Token> tokens(SEGMENT);
  std::vector<float> states((SEGMENT + 1) * N * N);  // before the first token of a segment, then after each
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h) {
      float dS[N * N] = {0};
      for (int64_t s = num_kept - 1; s >= 0; --s) {
        const int64_t first = s * SEGMENT, after = std::min(T, first + SEGMENT);
        std::copy_n(pk + ((b * H + h) * num_kept + s) * N * N, N * N, states.data());
        for (int64_t t = first; t < after; ++t) {
          const int64_t row = b * T + t;
          Token& token = tokens[t - first];
          const float* in = x + (row * 3 * H + h) * N;
          token.q_factor = unit(in, token.q);
          token.k_factor = unit(in + H * N, token.k);
          const float* before = states.data() + (t - first) * N * N;
          advance(before, states.data() + (t - first + 1) * N * N, token.k, in + 2 * H * N, pa + (row * H + h) * N, pb[row * H + h], token.write);
        }
        for (int64_t t = after - 1; t >= first; --t) {
          const int64_t row = b * T + t;
          const Token& token = tokens[t - first];
          Grads g;
          const float* before = states.data() + (t - first) * N * N;
          token_back(token, before, before + N * N, pa + (row * H + h) * N, pb[row * H + h], scale, pg + (row * H + h) * N, dS, g);
          float* out = dx + (row * 3 * H + h) * N;
          unit_back(token.q, token.q_factor, g.dq, out);
          unit_back(token.k, token.k_factor, g.dk, out + H * N);
          std::copy_n(g.dv, N, out + 2 * H * N);
          std::copy_n(g.da, N, da + (row * H + h) * N);
          db[row * H + h] = g.dbeta;
        }
      }
    }
  return {d_qkv, d_a, d_beta};
}

// x [B, T, C], weight [TAPS, C], window [B, TAPS - 1, C] of the inputs before -> SiLU of the causal convolution.
torch::Tensor conv_forward(torch::Tensor x, torch::Tensor weight, torch::Tensor window) {
  for (const auto& each : {x, weight, window}) check(each);
  const int64_t B = x.size(0), T = x.size(1), C = x.size(2);
  auto y = torch::empty_like(x);
  const float *px = x.data_ptr<float>(), *pw = weight.data_ptr<float>(), *pn = window.data_ptr<float>();
  float* py = y.data_ptr<float>();
  for (int64_t b = 0; b < B; ++b)
    for (int64_t t = 0; t < T; ++t) {
      const float* in[TAPS];
      for (int64_t j = 0; j < TAPS; ++j) {
        const int64_t at = t + j - (TAPS - 1);
        in[j] = at < 0 ? pn + (b * (TAPS - 1) + at + TAPS - 1) * C : px + (b * T + at) * C;
      }
      float* out = py + (b * T + t) * C;
      for (int64_t c = 0; c < C; ++c) {
        const float z = pw[c] * in[0][c] + pw[C + c] * in[1][c] + pw[2 * C + c] * in[2][c] + pw[3 * C + c] * in[3][c];
        out[c] = z / (1.0f + std::exp(-z));
      }
    }
  return y;
}

// Gradients of x and weight; the window is a constant.
std::vector<torch::Tensor> conv_backward(torch::Tensor x, torch::Tensor weight, torch::Tensor window, torch::Tensor gy) {
  for (const auto& each : {x, weight, window, gy}) check(each);
  const int64_t B = x.size(0), T = x.size(1), C = x.size(2);
  auto gx = torch::zeros_like(x), gw = torch::zeros_like(weight);
  const float *px = x.data_ptr<float>(), *pw = weight.data_ptr<float>(), *pn = window.data_ptr<float>(), *pg = gy.data_ptr<float>();
  float *dx = gx.data_ptr<float>(), *dw = gw.data_ptr<float>();
  std::vector<float> dz(C);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t t = 0; t < T; ++t) {
      const float* in[TAPS];
      for (int64_t j = 0; j < TAPS; ++j) {
        const int64_t at = t + j - (TAPS - 1);
        in[j] = at < 0 ? pn + (b * (TAPS - 1) + at + TAPS - 1) * C : px + (b * T + at) * C;
      }
      const float* g = pg + (b * T + t) * C;
      for (int64_t c = 0; c < C; ++c) {
        const float z = pw[c] * in[0][c] + pw[C + c] * in[1][c] + pw[2 * C + c] * in[2][c] + pw[3 * C + c] * in[3][c];
        const float gate = 1.0f / (1.0f + std::exp(-z));
        dz[c] = g[c] * gate * (1.0f + z * (1.0f - gate));
      }
      for (int64_t j = 0; j < TAPS; ++j) {
        const int64_t at = t + j - (TAPS - 1);
        float* to = at < 0 ? nullptr : dx + (b * T + at) * C;
        for (int64_t c = 0; c < C; ++c) dw[j * C + c] += dz[c] * in[j][c];
        if (to)
          for (int64_t c = 0; c < C; ++c) to[c] += dz[c] * pw[j * C + c];
      }
    }
  return {gx, gw};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("delta_forward", &delta_forward);
  m.def("delta_backward", &delta_backward);
  m.def("conv_forward", &conv_forward);
  m.def("conv_backward", &conv_backward);
}
