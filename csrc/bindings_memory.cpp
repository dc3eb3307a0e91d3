// SPDX-License-Identifier: Apache-2.0
// Hands blocks of memory over as DLPack tensors, which give them back by themselves, in whatever
// thread they end and without the interpreter's lock.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "bindings.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {
namespace {

// As DLPack defines it: https://dmlc.github.io/dlpack/latest/c_api.html.
struct ManagedTensor {
  nb::dlpack::dltensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct OwnedBlock {
  Block block;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  ManagedTensor managed;
};

void end_use(ManagedTensor* managed) {
  const std::unique_ptr<OwnedBlock> owned(static_cast<OwnedBlock*>(managed->context));
  return_block(owned->block);
}

// A capsule that a tensor was made of has another name; one that nobody took still owns the block.
void drop_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  auto* const managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

nb::object empty(const std::vector<int64_t>& shape, int code, int bits) {
  int64_t entries = 1;
  for (const int64_t size : shape) entries *= size;
  require(entries > 0 && bits % 8 == 0, "a block must have entries of whole bytes");
  auto owned = std::make_unique<OwnedBlock>();
  {
    const nb::gil_scoped_release release;
    owned->block = take_block(static_cast<size_t>(entries) * static_cast<size_t>(bits / 8));
  }
  if (owned->block.data == nullptr) throw std::bad_alloc();
  owned->shape = shape;
  owned->strides.resize(shape.size());
  int64_t step = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    owned->strides[axis] = step;
    step *= shape[axis];
  }
  nb::dlpack::dltensor& tensor = owned->managed.tensor;
  tensor.data = owned->block.data;
  tensor.device = {static_cast<int32_t>(nb::device::cpu::value), 0};
  tensor.ndim = static_cast<int32_t>(shape.size());
  tensor.dtype = {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  tensor.shape = owned->shape.data();
  tensor.strides = owned->strides.data();
  tensor.byte_offset = 0;
  owned->managed.context = owned.get();
  owned->managed.deleter = end_use;
  PyObject* const capsule = PyCapsule_New(&owned->managed, "dltensor", drop_capsule);
  if (capsule == nullptr) {
    return_block(owned->block);
    throw nb::python_error();
  }
  owned.release();
  return nb::steal(capsule);
}

}  // namespace

void bind_memory(nb::module_& m) {
  m.def(
      "expect_writes",
      [](uintptr_t address, size_t size) { expect_writes(reinterpret_cast<void*>(address), size); },
      "address"_a, "size"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("empty", &empty, "shape"_a, "code"_a, "bits"_a);
  m.def("release_blocks", &release_blocks, nb::call_guard<nb::gil_scoped_release>());
  m.def("block_counts", [] {
    const BlockCounts counts = block_counts();
    return nb::make_tuple(counts.used, counts.waiting, counts.peak);
  });
}

}  // namespace graphshard
