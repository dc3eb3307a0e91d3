// SPDX-License-Identifier: Apache-2.0
// The files of this folder alone know Python: they convert and check arguments, release the
// interpreter lock, and call the kernels. Arrays are borrowed for the length of a call; results go
// into arrays that the caller made. Kernels touch no Python object, so other threads may run
// meanwhile.

#include "bindings/arrays.h"
#include "simd/dispatch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {
namespace {

// Goes up, here and in _base/kernels.py, when a signature of these files changes.
constexpr int kInterface = 19;

}  // namespace

Csr csr_of(const InVector& indptr, const Ids& indices, const std::optional<InVector>& eids,
           size_t num_edges) {
  require(indptr.shape(0) > 0, "indptr must not be empty");
  const size_t most = indptr.dtype() == nb::dtype<int32_t>()
                          ? static_cast<size_t>(std::numeric_limits<int32_t>::max())
                          : static_cast<size_t>(std::numeric_limits<int64_t>::max());
  require(num_edges <= most, "there must be no more edges than the type of ids can tell apart");
  require(!eids || eids->shape(0) == num_edges, "eids must have num_edges entries");
  const Csr csr{ids_of(indptr), indices, ids_of(eids), rows_in(indptr) - 1,
                static_cast<int64_t>(num_edges)};
  const nb::gil_scoped_release release;
  require(ascends(csr.indptr, csr.num_rows, csr.num_edges),
          "indptr must ascend from 0 to num_edges");
  return csr;
}

bool is_negated(nb::handle source) noexcept {
  PyObject* const found = PyObject_CallMethod(source.ptr(), "is_neg", nullptr);
  if (found == nullptr) PyErr_Clear();  // no tensor
  Py_XDECREF(found);
  return found == Py_True;
}

nb::object plain_copy(nb::handle source) noexcept {
  PyObject* found = PyObject_CallMethod(source.ptr(), "resolve_neg", nullptr);
  if (found == source.ptr()) {  // nothing was put off
    Py_DECREF(found);
    found = PyObject_CallMethod(source.ptr(), "clone", nullptr);
  }
  if (found == nullptr) PyErr_Clear();
  return nb::steal(found);
}

NB_MODULE(_kernels, m) {
  m.doc() = "Sparse kernels over borrowed CPU arrays; called by graphshard.ops alone.";
  m.attr("interface") = kInterface;
  m.def("limit_registers", &limit_registers, "most"_a);
  bind_spmm(m);
  bind_memory(m);
  bind_attention(m);
  bind_dense(m);
  bind_embedding(m);
  bind_partition(m);
  bind_sampling(m);
  bind_tables(m);
}

}  // namespace graphshard
