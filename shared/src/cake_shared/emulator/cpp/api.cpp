#include "api.h"

#include <cxxabi.h>

#include <chrono>
#include <cstdlib>

#include "isa.h"
#include "json.h"
#include "module.h"
#include "overlap.h"
#include "scheduler.h"

using namespace cake::emu;

namespace {

char* copy_out(const std::string& s) {
  char* out = static_cast<char*>(std::malloc(s.size() + 1));
  std::memcpy(out, s.c_str(), s.size() + 1);
  return out;
}

using Files = std::map<u32, std::string>;

std::string source_of(u32 file, u32 line, const Files& files) {
  auto it = files.find(file);
  return (it == files.end() ? "?" : it->second) + ":" + std::to_string(line);
}

void write_parse_error(Json& j, const ParseError& e, const Files& files) {
  j.begin('{').key("detector").value(e.kind).key("text").value(e.text).key("line").value(e.line);
  if (e.source_line) j.key("source").value(source_of(e.source_file, e.source_line, files));
  j.end('}');
}

std::string parse_error_json(const ParseError& e, const Files& files) {
  Json j;
  write_parse_error(j, e, files);
  return j.text();
}

std::string located_json(const Located& f, const ModuleAst& ast) {
  Json j;
  j.begin('{').key("detector").value(f.detector).key("text").value(f.text).key("line").value(f.line);
  if (f.loc.line) j.key("source").value(source_of(f.loc.file, f.loc.line, ast.files));
  j.key("cta").value(f.cta).key("warp").value(f.warp).key("lane").value(f.lane).key("cta_id").begin('[');
  for (u32 v : f.cta_id) j.value(v);
  j.end(']').end('}');
  return j.text();
}

// As C++ writes it; the name itself where it is not one of C++.
std::string demangled(const std::string& name) {
  if (name.rfind("_Z", 0) != 0) return name;  // `f` alone would be read as the type float
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  const std::string out = status == 0 && text ? text : name;
  std::free(text);
  return out;
}

std::string describe(const Module& m) {
  Json j;
  j.begin('{').key("version").value(m.ast().version).key("target").value(m.ast().target).key("kernels").begin('[');
  for (const auto& [name, p] : m.programs()) {
    j.begin('{').key("name").value(name).key("demangled").value(demangled(name)).key("param_bytes").value(p->param_bytes);
    j.key("shared_bytes").value(p->shared_end - kSharedBase).key("max_threads").value(p->max_threads);
    j.key("register_bytes").value(p->register_bytes).key("instructions").value(u64(p->statements));
    j.key("communicates").value(p->communicates);
    j.key("required_threads").begin('[');
    for (u32 v : p->required_threads) j.value(v);
    j.end(']').key("cluster").begin('[');
    for (u32 v : p->cluster) j.value(v);
    j.end(']').key("params").begin('[');
    for (const auto& q : p->params) {
      j.begin('{').key("name").value(q.name).key("type").value(q.type).key("offset").value(q.offset);
      j.key("bytes").value(q.bytes).key("align").value(q.align).end('}');
    }
    j.end(']');
    if (const ParseError* e = m.broken(name)) write_parse_error(j.key("error"), *e, m.ast().files);
    j.end('}');
  }
  j.end(']').key("variables").begin('[');
  for (const auto& v : m.ast().variables) {
    if (v.space == Space::Shared) continue;
    j.begin('{')
        .key("name")
        .value(v.name)
        .key("bytes")
        .value(v.bytes)
        .key("address")
        .value(m.variable_address(v))
        .end('}');
  }
  j.end(']').end('}');
  return j.text();
}

std::string report(const Program& p, const Stats& s, double seconds) {
  std::map<std::string, u64> by_opcode;
  std::map<u32, u64> by_line;
  u64 total = 0;
  for (size_t k = 0; k < p.code.size(); ++k) {
    const u64 n = s.executed[k];
    if (!n || p.code[k].kind == Kind::Label) continue;
    total += n;
    by_opcode[p.opcodes[p.code[k].opcode]] += n;
    by_line[p.code[k].line] += n;
  }
  Json j;
  j.begin('{').key("instructions").value(total).key("thread_instructions").value(s.thread_instructions);
  j.key("by_opcode").begin('{');
  for (const auto& [name, n] : by_opcode) j.key(name).value(n);
  j.end('}').key("by_line").begin('{');
  for (const auto& [line, n] : by_line) j.key(std::to_string(line)).value(n);
  j.end('}').key("bytes").begin('{');
  const char* spaces[] = {"generic", "global", "shared", "cluster", "local", "param", "const"};
  for (int k = 0; k < 7; ++k) {
    j.key(std::string(spaces[k]) + "_read")
        .value(s.bytes[k][0])
        .key(std::string(spaces[k]) + "_write")
        .value(s.bytes[k][1]);
  }
  j.end('}').key("shared_accesses").value(s.shared_accesses).key("shared_wavefronts").value(s.shared_wavefronts);
  j.key("mma_flops").value(s.mma_flops).key("async_copies").value(s.async_copies);
  j.key("microseconds").value(u64(seconds * 1e6)).key("printed").value(s.printed).end('}');
  return j.text();
}

[[noreturn]] void refuse(const std::string& text) { fault("LaunchError", text); }

std::string at_most(u64 got, const char* what, u64 limit) {
  return std::to_string(got) + " " + what + ", at most " + std::to_string(limit);
}

// Registers of a CTA: the hardware hands them to warps in units of 256.
u64 cta_registers(u32 per_thread, u64 threads) { return (threads + kLanes - 1) / kLanes * round_up(per_thread * kLanes, 256); }

void check_limits(const Program& p, const CakeEmuLaunch& l) {
  const CakeEmuLimits& limits = l.limits;
  u64 threads = 1, ctas = 1;
  for (int k = 0; k < 3; ++k) {
    const std::string of = "dimension " + std::to_string(k) + " of the ";
    if (l.grid[k] == 0) refuse(of + "grid is 0");
    if (l.block[k] == 0) refuse(of + "block is 0");
    if (l.cluster[k] == 0) refuse(of + "cluster is 0");
    if (l.grid[k] % l.cluster[k]) refuse("the grid is no multiple of the cluster");
    if (k > 0 && l.grid[k] > 65535) refuse(at_most(l.grid[k], ("CTAs along " + of + "grid").c_str(), 65535));
    if (k == 2 && l.block[k] > 64) refuse(at_most(l.block[k], ("threads along " + of + "block").c_str(), 64));
    threads *= l.block[k];
    ctas *= l.cluster[k];
    if (p.required_threads[0] && p.required_threads[k] != l.block[k]) refuse("the kernel requires another block shape");
    if (p.cluster[0] && p.cluster[k] != l.cluster[k]) refuse("the kernel requires another cluster shape");
  }
  const u32 most = p.max_threads ? std::min(p.max_threads, limits.threads) : limits.threads;
  if (threads > most) refuse(at_most(threads, "threads in a CTA", most));
  if (ctas > limits.cluster_ctas) refuse(at_most(ctas, "CTAs in a cluster", limits.cluster_ctas));
  const u64 shared = static_cast<u64>(p.shared_end - kSharedBase) + l.dynamic_shared;
  if (shared > limits.shared_bytes) refuse(at_most(shared, "bytes of shared memory", limits.shared_bytes));
  const u32 registers = l.registers ? l.registers : p.max_registers;
  if (registers > limits.registers_per_thread) refuse(at_most(registers, "registers a thread", limits.registers_per_thread));
  if (cta_registers(registers, threads) > limits.registers_per_sm) {
    refuse(std::to_string(registers) + " registers for each of " + std::to_string(threads) + " threads exceed the SM's " +
           std::to_string(limits.registers_per_sm));
  }
  if (p.moves_registers && !p.max_registers && !p.max_threads && !p.required_threads[0]) {
    refuse("setmaxnreg in a kernel without .maxnreg, .maxntid or .reqntid: the compiler ignores it (give __launch_bounds__)");
  }
  if (l.param_bytes != p.param_bytes) {
    refuse(std::to_string(l.param_bytes) + " bytes of parameters, the kernel takes " + std::to_string(p.param_bytes));
  }
}

// What a thread starts with where setmaxnreg moves registers: as many as the directives leave room for, in steps of 8.
u32 starting_registers(const Program& p, const CakeEmuLimits& limits) {
  if (!p.moves_registers) return 0;
  if (p.max_registers) return p.max_registers / 8 * 8;
  const u32* d = p.required_threads;
  const u32 threads = round_up(d[0] ? d[0] * d[1] * d[2] : p.max_threads, kLanes);
  return std::min(limits.registers_per_thread, limits.registers_per_sm / (threads * p.min_ctas)) / 8 * 8;
}

}  // namespace

extern "C" {

void* cake_emu_module(const char* text, const char* target, char** json) {
  try {
    auto* m = new Module(text, target);
    *json = copy_out(describe(*m));
    return m;
  } catch (const ParseError& e) {
    *json = copy_out(parse_error_json(e, {}));
  } catch (const std::exception& e) {  // a fault of the emulator: said as one, instead of ending the process
    *json = copy_out(parse_error_json({"internal error", 0, e.what()}, {}));
  }
  return nullptr;
}

void cake_emu_module_free(void* module) { delete static_cast<Module*>(module); }

int cake_emu_launch(void* module, const char* kernel, const CakeEmuLaunch* l, char** json) {
  const Module& m = *static_cast<const Module*>(module);
  auto it = m.programs().find(kernel);
  if (const ParseError* e = m.broken(kernel)) {
    *json = copy_out(parse_error_json(*e, m.ast().files));
    return 1;
  }
  Stats stats;
  u8* params = nullptr;
  int status = 0;
  try {
    if (it == m.programs().end()) fault("LaunchError", std::string("no kernel ") + kernel);
    const Program& p = *it->second;
    check_limits(p, *l);
    Launch launch;
    launch.program = &p;
    launch.target = m.target();
    launch.files = &m.ast().files;
    launch.lines = &m.lines();
    const CakeEmuLimits& limits = l->limits;
    launch.limits = {limits.threads, limits.shared_bytes, limits.registers_per_sm, limits.registers_per_thread,
                     limits.cluster_ctas, limits.tmem_columns};
    launch.registers = starting_registers(p, limits);
    for (int k = 0; k < 3; ++k) {
      launch.grid[k] = l->grid[k];
      launch.block[k] = l->block[k];
      launch.cluster[k] = l->cluster[k];
    }
    launch.dynamic_shared = l->dynamic_shared;
    launch.params.assign(l->params, l->params + l->param_bytes);
    const size_t room = (l->param_bytes + 127) / 128 * 128 + 128;
    params = static_cast<u8*>(std::aligned_alloc(128, room));
    std::memset(params, 0, room);
    std::memcpy(params, l->params, l->param_bytes);
    launch.param_data = params;
    m.add_variables(launch.registry);
    const u64 at = reinterpret_cast<u64>(params);
    launch.registry.add({at, at + l->param_bytes, true, nullptr, "the kernel's parameters", Allocation::Owner::Launch});
    for (u64 k = 0; k < l->allocation_count; ++k) {
      const CakeEmuAllocation& a = l->allocations[k];
      launch.registry.add(
          {a.begin, a.begin + a.bytes, (a.flags & 1) != 0, l->detect == 2 ? a.written : nullptr, a.name});
    }
    launch.registry.finish();
    launch.order = static_cast<Order>(l->order);
    launch.detect = static_cast<Detect>(l->detect);
    launch.seed = l->seed;
    launch.max_instructions = l->max_instructions;
    launch.profile = l->profile;
    launch.trace_cta = l->trace_cta;
    launch.trace_warp = l->trace_warp;
    launch.stop_line = l->stop_line;
    for (int k = 0; k < 2; ++k) {
      launch.dump_shared[k] = l->dump_shared[k];
      launch.dump_tensor[k] = l->dump_tensor[k];
    }
    auto* history = static_cast<StreamHistory*>(l->stream);
    std::shared_ptr<LaunchRecord> record;
    if (launch.detect == Detect::All && (history || p.loads_in_bulk)) {
      StreamHistory alone(false);
      record = (history ? *history : alone).begin(p, m.ast().files, launch.registry, l->programmatic != 0);
      if (history) history->restart(false);  // stays so when this launch faults
      launch.record = record.get();
    }
    const auto start = std::chrono::steady_clock::now();
    run_gangs(launch, static_cast<int>(l->threads), stats);
    if (history && record) history->finished(std::move(record));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    *json = copy_out(report(p, stats, seconds));
  } catch (const Located& f) {
    *json = copy_out(located_json(f, m.ast()));
    status = 1;
  } catch (const Fault& f) {
    Located where;
    where.detector = f.detector;
    where.text = f.text;
    *json = copy_out(located_json(where, m.ast()));
    status = 1;
  }
  std::free(params);
  return status;
}

char* cake_emu_forms() {
  Json j;
  j.begin('[');
  for (const Form& form : all_forms()) {
    j.begin('[').value(form.base).value(modifiers_in_full(form)).value(form.operands).value(form.targets).end(']');
  }
  return copy_out(j.end(']').text());
}

void cake_emu_free(char* json) { std::free(json); }

void* cake_emu_stream(int unknown_before) { return new StreamHistory(unknown_before != 0); }
void cake_emu_stream_restart(void* stream, int unknown_before) {
  static_cast<StreamHistory*>(stream)->restart(unknown_before != 0);
}
void cake_emu_stream_free(void* stream) { delete static_cast<StreamHistory*>(stream); }
}
