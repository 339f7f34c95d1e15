// A simulated accelerator: a PyTorch device called "sim" whose memory is host memory and whose kernels are
// the CPU's, so that every mistake one can make with a real accelerator shows up on a machine that has none.
//
// What it takes from real hardware, and how:
//
// * Memory of its own. Bytes are counted exactly (as requested, no rounding), a cap raises OutOfMemoryError,
//   and fresh and released memory is filled with 0xFF: NaN in every floating point format.
//
// * Late copies. A stream is a queue. A non-blocking copy between host and device only enters the queue of
// the
//   current stream. It runs when that stream next does other work, when work runs on a stream that waits for
//   an event recorded after it, or when the host synchronises. Its source is read then, not before. So a
//   missing wait gives a wrong value, and so does refilling a host buffer too early.
//
// * Happens-before. Kernels run at once here but late on hardware, so values alone cannot show a copy that
//   overwrites what a queued kernel still reads. Vector clocks can: each stream counts its work in ticks, and
//   knows up to which tick of each other stream it has waited. Each byte range remembers who touched it last.
//   Touching a range whose last user is not covered by one's own clock is a race, recorded as a sentence.
//
// * One random generator per device, separate from the host's.
//
// What it gives up: kernels on side streams run at once (after what their stream has queued), the extent of a
// strided view counts as wholly touched, plain CPU code that touches host memory is not watched, and threads
// are taken to tell one another what the host has waited for.
//
// Locking: one mutex guards all of State. Counting references of a tensor that Python knows may need the GIL,
// so whoever holds the mutex may wait for the GIL, and nobody may wait for the mutex while holding the GIL.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace {

using at::Tensor;
using c10::StreamId;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int64_t kDefaultCap = int64_t{16} << 30;  // what a small GPU has
constexpr int kPoison = 0xFF;
constexpr size_t kAlignment = 64;
constexpr size_t kMostRaces = 50;  // one missing wait repeats at every step; the first few say it all

c10::Device sim_device() { return c10::Device(kSim, 0); }

// ----------------------------------------------------------------------------------------------------- state

using Clock = std::map<StreamId, uint64_t>;  // the last tick of each stream that is known to be over

void join(Clock& into, const Clock& other) {
  for (const auto& [stream, tick] : other) into[stream] = std::max(into[stream], tick);
}

bool covers(const Clock& clock, StreamId stream, uint64_t tick) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= tick;
}

struct Access {
  size_t begin, end;  // bytes within the block
  StreamId stream;
  uint64_t tick;
  bool writes;
  const char* by;  // operator name; operators are never unregistered
  int64_t epoch;
};

// One allocation, on the device or pinned on the host. It is the context of the storage's DataPtr.
struct Block {
  void* memory = nullptr;
  size_t nbytes = 0;
  int64_t serial = 0;
  bool on_device = true;
  StreamId owner = 0;            // the stream that was current at allocation
  std::set<StreamId> announced;  // record_stream was called for these
  std::vector<Access> accesses;
};

struct Session;
using Task = std::function<void(Session&)>;

struct Queue {
  std::deque<Task> tasks;
  uint64_t done = 0;
  Clock clock;
  uint64_t issued() const { return done + tasks.size(); }
};

const std::map<std::string, int64_t> kNoTraffic = {
    {"h2d_copies", 0}, {"h2d_nbytes", 0}, {"d2h_copies", 0}, {"d2h_nbytes", 0}, {"unpinned_late_copies", 0}};

struct State {
  std::recursive_mutex mutex;
  std::map<StreamId, Queue> streams;
  StreamId newest_stream = 0;
  Clock host;         // what the host has synchronised with; all later work comes after it
  int64_t epoch = 0;  // grows at a reset; accesses of an earlier epoch are over
  std::vector<std::string> races;
  int64_t serial = 0;
  int64_t now = 0, peak = 0, cap = kDefaultCap, allocations = 0, ooms = 0;
  std::map<std::string, int64_t> traffic = kNoTraffic;
  std::map<const char*, size_t> pinned;  // address -> bytes
  bool visible = true;                   // what torch.accelerator.is_available() says
};

State& state() {
  static State& leaked = *new State;  // tensors may outlive static destruction
  return leaked;
}

thread_local StreamId t_stream = 0;

struct Lock {
  Lock() {
    if (state().mutex.try_lock()) return;
    std::optional<pybind11::gil_scoped_release> others_may_run;
    if (PyGILState_Check()) others_may_run.emplace();
    state().mutex.lock();
  }
  ~Lock() { state().mutex.unlock(); }
  Lock(const Lock&) = delete;
};

// A lock, and the tasks that ran under it. They die after it, since what they held may be released by that.
struct Session {
  std::vector<Task> finished;  // declared first: destroyed last
  Lock lock;
};

// Whether all work that is still to come is ordered after this access.
bool is_over(const Access& access) {
  return access.epoch != state().epoch || covers(state().host, access.stream, access.tick);
}

void report_race(const std::string& text) {
  auto& races = state().races;
  if (races.size() < kMostRaces && std::find(races.begin(), races.end(), text) == races.end())
    races.push_back(text);
}

// ---------------------------------------------------------------------------------------------------- memory

void delete_block(void* context);

c10::DataPtr make_block(size_t nbytes, bool on_device, c10::Device device) {
  if (nbytes == 0) return {nullptr, nullptr, &delete_block, device};
  const size_t padded = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  auto* block = new Block;
  block->memory = std::aligned_alloc(kAlignment, padded);
  TORCH_CHECK(block->memory, "the host itself has no ", nbytes, " bytes left for the simulated device");
  memset(block->memory, kPoison, padded);
  block->nbytes = nbytes;
  block->on_device = on_device;
  block->owner = t_stream;
  Lock lock;
  block->serial = ++state().serial;
  if (!on_device) state().pinned[static_cast<const char*>(block->memory)] = nbytes;
  return {block->memory, block, &delete_block, device};
}

// Memory goes back to the stream that allocated it, which may hand it out again at once. So that stream must
// have waited for all others that used the block, or have been told of them by record_stream.
void check_release(const Block& block) {
  auto& s = state();
  for (const auto& access : block.accesses) {
    if (access.stream == block.owner || block.announced.count(access.stream) || is_over(access)) continue;
    if (covers(s.streams[block.owner].clock, access.stream, access.tick)) continue;
    std::ostringstream text;
    text << "block " << block.serial << " (" << block.nbytes << " bytes) of stream " << block.owner
         << " was released while " << access.by << " on stream " << access.stream
         << " may still use it: wait for that stream first, or call record_stream";
    report_race(text.str());
  }
}

void delete_block(void* context) {
  if (!context) return;
  auto* block = static_cast<Block*>(context);
  {
    Lock lock;
    if (block->on_device) {
      check_release(*block);
      state().now -= static_cast<int64_t>(block->nbytes);
    } else {
      state().pinned.erase(static_cast<const char*>(block->memory));
    }
  }
  memset(block->memory, kPoison, block->nbytes);
  std::free(block->memory);
  delete block;
}

Block* block_of(const c10::DataPtr& data) {
  return static_cast<Block*>(data.cast_context<Block>(&delete_block));
}

struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    {
      Lock lock;
      auto& s = state();
      const auto asked = static_cast<int64_t>(nbytes);
      if (s.now + asked > s.cap) {
        ++s.ooms;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory: asked for ", asked, " bytes with ",
                         s.now, " of ", s.cap, " bytes in use");
      }
      s.now += asked;
      s.peak = std::max(s.peak, s.now);
      ++s.allocations;
    }
    return make_block(nbytes, /*on_device=*/true, sim_device());
  }

  void copy_data(void* target, const void* source, size_t nbytes) const override {
    memcpy(target, source, nbytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is cached
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock;
    if (auto* block = block_of(data)) block->announced.insert(stream.id());
  }

  // torch.accelerator.memory_stats reads these; allocated and reserved are the same here.
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Lock lock;
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes :
         {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = state().now;
      (*bytes)[0].peak = state().peak;
    }
    stats.allocation[0].allocated = state().allocations;
    stats.num_ooms = state().ooms;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    Lock lock;
    state().allocations = state().ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    Lock lock;
    state().peak = state().now;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    Lock lock;
    return {std::max<int64_t>(0, state().cap - state().now), state().cap};
  }
};

SimAllocator g_allocator;
REGISTER_ALLOCATOR(kSim, &g_allocator)

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    return make_block(nbytes, /*on_device=*/false, c10::Device(c10::DeviceType::CPU));
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    memcpy(target, source, nbytes);
  }
};

PinnedAllocator g_pinned_allocator;

// -------------------------------------------------------------------------------------------- happens-before

// Notes that work `by` with number `tick` of `stream` touches what `tensor` covers; a Session must be open.
void touch(const Tensor& tensor, StreamId stream, uint64_t tick, bool writes, const char* by) {
  if (!tensor.defined() || tensor.numel() == 0 || !tensor.has_storage()) return;
  auto* block = block_of(tensor.storage().data_ptr());
  if (!block) return;  // host memory that is not pinned
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const size_t begin = tensor.storage_offset() * tensor.element_size();
  const size_t end = begin + (last + 1) * tensor.element_size();

  auto& accesses = block->accesses;
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), is_over), accesses.end());
  const auto& clock = state().streams[stream].clock;
  for (const auto& old : accesses) {
    const bool overlaps = old.begin < end && begin < old.end;
    const bool conflicts = old.writes || writes;
    if (!overlaps || !conflicts || old.stream == stream || covers(clock, old.stream, old.tick)) continue;
    std::ostringstream text;
    text << by << " on stream " << stream << (writes ? " writes" : " reads") << " bytes [" << begin << ", "
         << end << ") of " << (block->on_device ? "device" : "pinned") << " block " << block->serial
         << ", which " << old.by << " on stream " << old.stream << " may still be "
         << (old.writes ? "writing" : "reading") << ": no wait for an event that was recorded after it";
    report_race(text.str());
  }
  // An old access inside this range that this one supersedes need not be kept: whoever is ordered after this
  // one is ordered after the old one too. A read supersedes only reads, or others could overwrite unseen.
  auto superseded = [&](const Access& old) {
    const bool inside = begin <= old.begin && old.end <= end;
    const bool ordered = old.stream == stream || covers(clock, old.stream, old.tick);
    return inside && (writes ? ordered : !old.writes && old.stream == stream);
  };
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), superseded), accesses.end());
  accesses.push_back({begin, end, stream, tick, writes, by, state().epoch});
}

// --------------------------------------------------------------------------------------------------- streams

void drain(Session& session, StreamId id, uint64_t up_to) {
  auto& queue = state().streams[id];
  while (queue.done < up_to && !queue.tasks.empty()) {
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    ++queue.done;
    task(session);
    session.finished.push_back(std::move(task));
  }
}

// Opens a piece of work on a stream and returns its tick.
uint64_t issue(StreamId id) {
  auto& clock = state().streams[id].clock;
  join(clock, state().host);
  return ++clock[id];
}

// Work that runs at once runs after everything its stream has queued.
uint64_t issue_now(Session& session, StreamId id) {
  const uint64_t tick = issue(id);
  drain(session, id, UINT64_MAX);
  return tick;
}

void synchronize(Session& session, StreamId id) {
  drain(session, id, UINT64_MAX);
  join(state().host, state().streams[id].clock);
}

void synchronize_all(Session& session) {
  std::vector<StreamId> ids;
  for (const auto& entry : state().streams) ids.push_back(entry.first);
  for (auto id : ids) synchronize(session, id);
}

// Everything so far is over. What the streams knew of one another need not be kept.
void start_epoch(Session& session) {
  synchronize_all(session);
  ++state().epoch;
  state().races.clear();
  state().host.clear();
  for (auto& [id, queue] : state().streams) queue.clock = {{id, queue.clock[id]}};
}

struct Event {
  StreamId stream = 0;
  uint64_t position = 0;  // how much of the stream's queue lies before the event
  Clock clock;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kSim;

  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device exchangeDevice(c10::Device) const override { return sim_device(); }
  c10::Device getDevice() const override { return sim_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream stream(StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, sim_device(), id); }
  c10::Stream getStream(c10::Device) const override { return stream(t_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    Session session;
    return stream(++state().newest_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(t_stream, next.id()));
  }

  void record(void** handle, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    Session session;
    if (!*handle) *handle = new Event;
    auto& queue = state().streams[on.id()];
    join(queue.clock, state().host);
    *static_cast<Event*>(*handle) = {on.id(), queue.issued(), queue.clock};
  }
  void block(void* handle, const c10::Stream& waiting) const override {
    if (!handle) return;
    Session session;
    const Event event = *static_cast<Event*>(handle);
    if (event.stream == waiting.id()) return;
    auto& queue = state().streams[waiting.id()];
    join(queue.clock, event.clock);
    queue.tasks.push_back([event](Session& s) { drain(s, event.stream, event.position); });
  }
  void destroyEvent(void* handle, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(handle);
  }
  void synchronizeEvent(void* handle) const override {
    if (!handle) return;
    Session session;
    const Event event = *static_cast<Event*>(handle);
    drain(session, event.stream, event.position);
    join(state().host, event.clock);
  }
  // A query never waits, but a loop that polls must end: the work runs after the answer "not yet" was given.
  bool queryEvent(void* handle) const override {
    if (!handle) return true;
    Session session;
    const Event event = *static_cast<Event*>(handle);
    const bool over = state().streams[event.stream].done >= event.position;
    if (over)
      join(state().host, event.clock);
    else
      drain(session, event.stream, event.position);
    return over;
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "sim events keep no time: elapsed_time is not supported, use a host clock");
  }

  bool queryStream(const c10::Stream& queried) const override {
    Session session;
    const bool over = state().streams[queried.id()].tasks.empty();
    if (over)
      synchronize(session, queried.id());
    else
      drain(session, queried.id(), UINT64_MAX);
    return over;
  }
  void synchronizeStream(const c10::Stream& awaited) const override {
    Session session;
    synchronize(session, awaited.id());
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    Session session;
    synchronize_all(session);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    g_allocator.recordStream(data, on);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ------------------------------------------------------------------------------------------------- generator

// The CPU's generator under a device of its own, so that a generator of the wrong device is an error as on
// hardware, and so that host draws and device draws do not disturb each other.
struct SimGenerator final : c10::GeneratorImpl {
  at::Generator cpu;

  explicit SimGenerator(at::Generator inner)
      : GeneratorImpl(sim_device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& bytes) override { cpu.unsafeGetGeneratorImpl()->set_state(bytes); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  SimGenerator* clone_impl() const override { return new SimGenerator(cpu.clone()); }
};

at::Generator new_generator() {
  return at::make_generator<SimGenerator>(
      at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val));
}

const at::Generator& default_generator() {
  static at::Generator& leaked = *new at::Generator(new_generator());
  return leaked;
}

at::Generator cpu_generator(const std::optional<at::Generator>& given) {
  const auto& generator = given.has_value() && given->defined() ? *given : default_generator();
  TORCH_CHECK(generator.device().type() == kSim, "expected a generator on sim, got one on ",
              generator.device());
  return generator.get<SimGenerator>()->cpu;
}

// ----------------------------------------------------------------------------------------------------- hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return state().visible; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    TORCH_CHECK(index == 0, "sim has the one device sim:0, got index ", static_cast<int>(index));
  }
  at::Device getDeviceFromPtr(void*) const override { return sim_device(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }
  bool isPinnedPtr(const void* address) const override {
    Lock lock;
    const auto& pinned = state().pinned;
    auto after = pinned.upper_bound(static_cast<const char*>(address));
    if (after == pinned.begin()) return false;
    const auto& [begin, nbytes] = *std::prev(after);
    return static_cast<const char*>(address) < begin + nbytes;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto grown = g_allocator.allocate(nbytes);
    const size_t kept = std::min(nbytes, storage.nbytes());
    if (kept) memcpy(grown.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

// ---------------------------------------------------------------------------------------------------- copies

// The same bytes as a CPU tensor. It does not keep the device memory alive.
Tensor as_cpu(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  auto same = at::from_blob(
      const_cast<void*>(tensor.storage().data()), tensor.sizes(), tensor.strides(), tensor.storage_offset(),
      [](void*) {}, tensor.options().device(at::kCPU).requires_grad(false));
  same._set_conj(tensor.is_conj());
  same._set_neg(tensor.is_neg());
  return same;
}

std::optional<Tensor> as_cpu(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? std::optional<Tensor>(as_cpu(*tensor)) : std::nullopt;
}

void copy_bytes(const Tensor& source, const Tensor& target) {
  // Runs under the mutex: nothing here may call into Python, where a dispatch mode would want the GIL.
  c10::impl::ExcludeDispatchKeyGuard no_python(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}) |
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset);
  target.copy_(source);
}

void count_traffic(const Tensor& target) {
  const std::string direction = target.is_privateuseone() ? "h2d" : "d2h";
  state().traffic[direction + "_copies"] += 1;
  state().traffic[direction + "_nbytes"] += static_cast<int64_t>(target.nbytes());
}

void enqueue_copy(const Tensor& source, const Tensor& target, StreamId id) {
  const auto& host = target.is_privateuseone() ? source : target;
  const auto& device = target.is_privateuseone() ? target : source;
  if (!block_of(host.storage().data_ptr())) ++state().traffic["unpinned_late_copies"];
  state().streams[id].tasks.push_back([from = as_cpu(source).expand(target.sizes()), to = as_cpu(target),
                                       host, memory = device.storage(), id](Session&) {
    auto* block = block_of(memory.data_ptr());
    const bool released = memory.use_count() == 1;  // this queue alone still holds it
    if (released && block && block->owner != id && !block->announced.count(id)) {
      std::ostringstream text;
      text << "block " << block->serial << " (" << block->nbytes << " bytes) of stream " << block->owner
           << " was released while a copy on stream " << id
           << " had not run: wait first, or call record_stream";
      report_race(text.str());
    }
    copy_bytes(from, to);
  });
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Session session;
  const StreamId id = t_stream;
  const bool crosses = source.is_privateuseone() != target.is_privateuseone();
  const bool late = crosses && non_blocking;
  const uint64_t tick = late ? issue(id) : issue_now(session, id);
  const char* by = !crosses                    ? "a copy"
                   : target.is_privateuseone() ? "a host-to-device copy"
                                               : "a device-to-host copy";
  touch(source, id, tick, /*writes=*/false, by);
  touch(target, id, tick, /*writes=*/true, by);
  if (crosses) count_traffic(target);
  if (late) {
    enqueue_copy(source, target, id);
    return target;
  }
  copy_bytes(as_cpu(source), as_cpu(target));
  if (crosses) synchronize(session, id);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  Session session;
  touch(self, t_stream, issue_now(session, t_stream), /*writes=*/false, "item()");
  synchronize(session, t_stream);
  return as_cpu(self).item();
}

// ------------------------------------------------------------------------------------------------- operators

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &g_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &g_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                  std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor& set_source_view(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_source_storage(Tensor& self, at::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_source_view(self, std::move(source), 0, {items}, {1});
}

Tensor& set_source_tensor(Tensor& self, const Tensor& source) {
  return set_source_view(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// As on other accelerators, `parameter.data = there` may change the device; Module.to keeps tied weights by
// it.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  auto is_dense = [](const Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_privateuseone());
  };
  return is_dense(self) && is_dense(from);
}

void record_stream(Tensor& self, c10::Stream stream) {
  g_allocator.recordStream(self.storage().data_ptr(), stream);
}

// Applies `f` to every tensor that an argument or result holds, and names the CPU as the device.
c10::IValue map_tensors(const c10::IValue& value, const std::function<Tensor(const Tensor&)>& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isDevice()) return c10::Device(at::kCPU);
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) mapped.push_back(f(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      mapped.push_back(tensor.has_value() ? std::optional<Tensor>(f(*tensor)) : std::nullopt);
    return mapped;
  }
  return value;
}

std::vector<Tensor> tensors_of(const c10::IValue& value) {
  std::vector<Tensor> found;
  map_tensors(value, [&](const Tensor& tensor) {
    if (tensor.defined()) found.push_back(tensor);
    return tensor;
  });
  return found;
}

// As on hardware, a kernel takes tensors of its own device, and zero-dimensional host tensors as scalars.
// Indexing and packing are the operators that take host tensors on purpose.
void check_devices(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments) {
  static const std::set<std::string> take_host_tensors = {
      "aten::index",      "aten::_index_put_impl_", "aten::index_put",    "aten::index_put_",
      "aten::_copy_from", "aten::_pin_memory",      "aten::tensor_split", "aten::_pack_padded_sequence"};
  if (take_host_tensors.count(schema.name())) return;
  for (const auto& argument : arguments) {
    for (const Tensor& tensor : tensors_of(argument)) {
      TORCH_CHECK(
          tensor.is_privateuseone() || tensor.dim() == 0, schema.name(),
          ": expected all tensors to be on the same device, but found at least two devices, sim:0 and ",
          tensor.device(), "!");
    }
  }
}

bool takes_generator(const c10::Argument& argument) {
  const auto* optional = argument.type()->castRaw<c10::OptionalType>();
  const auto& type = optional ? optional->getElementType() : argument.type();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// A result of a CPU kernel moves into device memory, which is where it is counted.
Tensor to_sim(const Tensor& result) {
  if (!result.defined()) return result;
  const auto dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
  auto moved = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(sim_device()));
  copy_bytes(dense, as_cpu(moved));
  return moved;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// A tensor given as `out=` may be resized by the kernel, which borrowed memory does not allow.
bool is_out(const c10::Argument& argument) { return argument.kwarg_only() && is_written(argument); }

void write_back(const Tensor& result, const Tensor& out) {
  if (out.sizes() != result.sizes()) out.resize_(result.sizes());
  copy_bytes(result, as_cpu(out));
}

// What a caller gets for the result that `returned` describes: an argument that was written, or a new tensor.
c10::IValue returned_value(const c10::FunctionSchema& schema, const c10::Argument& returned,
                           const torch::jit::Stack& arguments, const c10::IValue& result) {
  if (is_written(returned)) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias && *alias == *returned.alias_info()) return arguments[i];
    }
  }
  return map_tensors(result, to_sim);
}

// Every other operator is the CPU's kernel, on the very memory of its arguments (same strides and alignment,
// so results equal the CPU's bit for bit), as one piece of work of the current stream.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const char* name = schema.name().c_str();
  const torch::jit::Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  check_devices(schema, arguments);
  uint64_t tick;
  {
    Session session;
    tick = issue_now(session, t_stream);
    for (size_t i = 0; i < arguments.size(); ++i)
      for (const Tensor& tensor : tensors_of(arguments[i]))
        touch(tensor, t_stream, tick, is_written(schema.arguments()[i]), name);
  }

  torch::jit::Stack on_cpu;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (takes_generator(argument)) {
      on_cpu.emplace_back(cpu_generator(arguments[i].toOptional<at::Generator>()));
    } else if (is_out(argument)) {
      on_cpu.push_back(map_tensors(arguments[i], [](const Tensor& out) { return as_cpu(out).clone(); }));
    } else {
      on_cpu.push_back(map_tensors(arguments[i], [](const Tensor& tensor) { return as_cpu(tensor); }));
    }
  }
  torch::jit::Stack results = on_cpu;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_out(schema.arguments()[i])) continue;
    const auto outs = tensors_of(arguments[i]), computed = tensors_of(on_cpu[i]);
    for (size_t k = 0; k < outs.size(); ++k) write_back(computed[k], outs[k]);
  }
  for (size_t i = 0; i < results.size(); ++i)
    stack->push_back(returned_value(schema, schema.returns()[i], arguments, results[i]));

  Session session;
  for (size_t i = stack->size() - results.size(); i < stack->size(); ++i)
    for (const Tensor& tensor : tensors_of((*stack)[i])) touch(tensor, t_stream, tick, /*writes=*/true, name);
}

// The operators below have no CPU kernel of the same name, so the fallback cannot find one. They are one
// piece of work, as a fallback is: `inputs` are read, the CPU computes, the results move into device memory.
void begin_kernel(const char* name, std::initializer_list<Tensor> inputs) {
  Session session;
  const uint64_t tick = issue_now(session, t_stream);
  for (const auto& input : inputs) touch(input, t_stream, tick, /*writes=*/false, name);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                   bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  begin_kernel("aten::convolution", {input, weight, bias.value_or(Tensor())});
  const auto cpu_bias = bias.has_value() && bias->defined() ? as_cpu(bias) : std::nullopt;
  return to_sim(at::convolution_symint(as_cpu(input), as_cpu(weight), cpu_bias, stride, padding, dilation,
                                       transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad_output, const Tensor& input,
                                                        const Tensor& weight, c10::SymIntArrayRef stride,
                                                        c10::SymIntArrayRef padding,
                                                        c10::SymIntArrayRef dilation, bool transposed,
                                                        c10::SymIntArrayRef output_padding,
                                                        c10::SymInt groups, std::array<bool, 3> mask) {
  begin_kernel("aten::convolution_backward", {grad_output, input, weight});
  const std::vector<c10::SymInt> bias_size{weight.sym_size(transposed ? 1 : 0) *
                                           (transposed ? groups : c10::SymInt(1))};
  auto grads = at::convolution_backward_symint(as_cpu(grad_output), as_cpu(input), as_cpu(weight),
                                               c10::OptionalArrayRef<c10::SymInt>(bias_size), stride, padding,
                                               dilation, transposed, output_padding, groups, mask);
  return {to_sim(std::get<0>(grads)), to_sim(std::get<1>(grads)), to_sim(std::get<2>(grads))};
}

// Accelerators count integers too, and transformers' experts rely on it; the CPU counts floating point only.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  begin_kernel("aten::histc", {self});
  const auto values = as_cpu(self);
  if (values.is_floating_point()) return to_sim(at::histc(values, bins, min, max));
  return to_sim(at::histc(values.to(at::kDouble), bins, min, max).to(values.scalar_type()));
}

// The CPU's own native_dropout draws from the host's generator, whatever it is asked.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  begin_kernel("aten::native_dropout", {input});
  const auto mask = at::empty(input.sizes(), input.options().device(at::kCPU).dtype(at::kBool));
  if (!train.value_or(true)) return {to_sim(as_cpu(input).clone()), to_sim(mask.fill_(true))};
  mask.bernoulli_(1 - p, cpu_generator(std::nullopt));
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  return {to_sim(as_cpu(input).mul(mask).mul_(scale)), to_sim(mask)};
}

// Attention takes the path that the CPU would take for the same arguments, so that results are equal bit for
// bit.
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& mask, double dropout_p, bool is_causal,
                         std::optional<double> scale, bool enable_gqa) {
  auto cpu_mask = as_cpu(mask);
  if (cpu_mask.has_value() && cpu_mask->defined() && mask->requires_grad()) cpu_mask->set_requires_grad(true);
  const auto choice =
      static_cast<at::SDPBackend>(at::_fused_sdp_choice(as_cpu(query), as_cpu(key), as_cpu(value), cpu_mask,
                                                        dropout_p, is_causal, scale, enable_gqa));
  return static_cast<int64_t>(choice == at::SDPBackend::flash_attention ? at::SDPBackend::overrideable
                                                                        : at::SDPBackend::math);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
    double dropout_p, bool is_causal, bool, std::optional<double> scale) {
  begin_kernel("aten::scaled_dot_product_attention", {query, key, value, mask.value_or(Tensor())});
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(as_cpu(query), as_cpu(key), as_cpu(value), dropout_p,
                                                      is_causal, as_cpu(mask), scale);
  return {to_sim(output),  to_sim(logsumexp), Tensor(), Tensor(), query.sym_size(2),
          key.sym_size(2), Tensor(),          Tensor(), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& mask, std::array<bool, 4>, const Tensor& output, const Tensor& logsumexp, const Tensor&,
    const Tensor&, c10::SymInt, c10::SymInt, double dropout_p, bool is_causal, const Tensor&, const Tensor&,
    std::optional<double> scale) {
  begin_kernel("aten::scaled_dot_product_attention_backward",
               {grad_output, query, key, value, mask, output, logsumexp});
  const auto cpu_mask = mask.defined() ? std::optional<Tensor>(as_cpu(mask)) : std::nullopt;
  auto [d_query, d_key, d_value] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(as_cpu(grad_output), as_cpu(query),
                                                               as_cpu(key), as_cpu(value), as_cpu(output),
                                                               as_cpu(logsumexp), dropout_p, is_causal,
                                                               cpu_mask, scale);
  return {to_sim(d_query), to_sim(d_key), to_sim(d_value), Tensor()};
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage", set_source_storage);
  m.impl("set_.source_Storage_storage_offset", set_source_view);
  m.impl("set_.source_Tensor", set_source_tensor);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("histc", histc);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_dropout", native_dropout);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  // PyTorch composes these from simpler operators for a device without kernels of its own; the CPU, like
  // every accelerator, has kernels, which round otherwise.
  for (const char* composed : {"silu_backward", "mish_backward", "native_layer_norm", "native_group_norm"})
    m.impl(composed, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// A copy resolves lazy conjugation and negation itself; PyTorch's own way to resolve them is a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// Autocast casts the same operators as on the other accelerators. The macros want to be inside namespace at.
namespace at {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_UNLESS_ASKED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
// clang-format off
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_UNLESS_ASKED)
  AT_FORALL_PROMOTE(WIDEST)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
}
// clang-format on
}  // namespace at

// A function for Python that runs `f` under the lock.
template <class F>
auto locked(F f) {
  return [f] {
    Session session;
    return f(session);
  };
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("now", locked([](Session&) { return state().now; }));
  m.def("peak", locked([](Session&) { return state().peak; }));
  m.def("reset_peak", locked([](Session&) { state().peak = state().now; }));
  m.def("set_cap", [](std::optional<int64_t> nbytes) {
    Lock lock;
    state().cap = nbytes.value_or(kDefaultCap);
  });
  m.def("races", locked([](Session&) { return state().races; }));
  m.def("pending", locked([](Session&) {
          size_t tasks = 0;
          for (const auto& entry : state().streams) tasks += entry.second.tasks.size();
          return tasks;
        }));
  m.def("synchronize", locked(synchronize_all));
  m.def("start_epoch", locked(start_epoch));
  m.def("traffic", locked([](Session&) { return state().traffic; }));
  m.def("reset_traffic", locked([](Session&) { state().traffic = kNoTraffic; }));
  m.def("visible", locked([](Session&) { return state().visible; }));
  m.def("set_visible", [](bool visible) {
    Lock lock;
    state().visible = visible;
  });
  m.def("default_generator", [] { return default_generator(); });
}
