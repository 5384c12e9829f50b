// Fused attention, which stores no intermediate results, as that of other devices. RMS norms are not fused.

#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include "device.h"

namespace simu {

namespace {

using at::Tensor;
using std::optional;

int64_t choice(
    const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& mask, double dropout, bool,
    optional<double>, bool shares_keys) {
  bool fits = query.dim() == 4 && query.size(3) == value.size(3) && dropout == 0.0 && !(mask && mask->requires_grad()) &&
      (shares_keys || query.size(1) == key.size(1));
  return static_cast<int64_t>(fits ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& mask, double dropout,
    bool is_causal, bool, optional<double> scale) {
  auto [output, sums] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, mask, scale);
  return {output, sums, Tensor(), Tensor(), query.sym_size(2), key.sym_size(2), Tensor(), Tensor(), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
    std::array<bool, 4>, const Tensor& output, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt,
    c10::SymInt, double dropout, bool is_causal, const Tensor&, const Tensor&, optional<double> scale) {
  auto given = mask.defined() ? optional<Tensor>(mask) : std::nullopt;
  auto [query_gradient, key_gradient, value_gradient] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, query, key, value, output, sums, dropout, is_causal, given, scale);
  return {query_gradient, key_gradient, value_gradient, Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}

}  // namespace simu

namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simu::choice)

}  // namespace at::native
