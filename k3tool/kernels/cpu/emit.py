"""Compiled CPU kernels written as Python: expressions over `Value` become LLVM instructions.

A kernel is a Python function that runs once, at load time, and leaves behind machine code. `Value` overloads the
operators, `Emitter` holds loops, memory and vectors. Addresses are plain 64-bit integers. There is no type
inference: integers meet integers of the same width, floats meet floats, and Python numbers adapt to their partner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
POINTER = ir.PointerType()
VOID = ir.VoidType()


class _FunctionPointer(ir.PointerType):
    """An untyped pointer to LLVM that still tells llvmlite what it points to."""

    def __init__(self, signature: ir.FunctionType) -> None:
        super().__init__()
        self.pointee = signature


def vector(element: ir.Type, lanes: int) -> ir.Type:
    return ir.VectorType(element, lanes)


def _element(type_: ir.Type) -> ir.Type:
    return type_.element if isinstance(type_, ir.VectorType) else type_


def _is_float(type_: ir.Type) -> bool:
    return isinstance(_element(type_), (ir.FloatType, ir.HalfType))


def _alignment(type_: ir.Type) -> int:
    """Bytes: that of one number, whatever vector it is in."""
    element: Any = _element(type_)
    return element.width // 8 if isinstance(element, ir.IntType) else 2 if isinstance(element, ir.HalfType) else 4


def constant(type_: ir.Type, number: float | Sequence[float]) -> ir.Constant:
    """A number in every lane, or one number per lane."""
    if isinstance(type_, ir.VectorType):
        lanes = [number] * type_.count if isinstance(number, (int, float)) else list(number)
        return ir.Constant(type_, [constant(type_.element, lane) for lane in lanes])
    return ir.Constant(type_, float(number) if _is_float(type_) else int(number))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Value:
    """An LLVM value that knows its emitter."""

    emitter: Emitter
    ir: Any

    @property
    def type(self) -> ir.Type:
        return self.ir.type

    @property
    def lanes(self) -> int:
        """Numbers in a vector; a scalar is one."""
        return getattr(self.ir.type, "count", 1)

    def _with(self, other: Value | float) -> Any:
        return other.ir if isinstance(other, Value) else constant(self.type, other)

    def _arithmetic(self, other: Value | float, integer: str, real: str | None = None) -> Value:
        operation = real if _is_float(self.type) and real else integer
        return Value(self.emitter, getattr(self.emitter.builder, operation)(self.ir, self._with(other)))

    def __add__(self, other: Value | float) -> Value:
        return self._arithmetic(other, "add", "fadd")

    __radd__ = __add__

    def __sub__(self, other: Value | float) -> Value:
        return self._arithmetic(other, "sub", "fsub")

    def __rsub__(self, other: float) -> Value:
        return Value(self.emitter, constant(self.type, other)) - self

    def __mul__(self, other: Value | float) -> Value:
        return self._arithmetic(other, "mul", "fmul")

    __rmul__ = __mul__

    def __truediv__(self, other: Value | float) -> Value:
        return self._arithmetic(other, "fdiv")

    def __floordiv__(self, other: Value | int) -> Value:
        """Quotient of two non-negative integers."""
        return self._arithmetic(other, "udiv")

    def __mod__(self, other: Value | int) -> Value:
        """Remainder of two non-negative integers."""
        return self._arithmetic(other, "urem")

    def __and__(self, other: Value | int) -> Value:
        return self._arithmetic(other, "and_")

    def __or__(self, other: Value | int) -> Value:
        return self._arithmetic(other, "or_")

    def __xor__(self, other: Value | int) -> Value:
        return self._arithmetic(other, "xor")

    def __lshift__(self, other: Value | int) -> Value:
        return self._arithmetic(other, "shl")

    def __rshift__(self, other: Value | int) -> Value:
        """Logical shift: zeros come in."""
        return self._arithmetic(other, "lshr")

    def _compare(self, operator: str, other: Value | float) -> Value:
        builder = self.emitter.builder
        compare = builder.fcmp_ordered if _is_float(self.type) else builder.icmp_signed
        return Value(self.emitter, compare(operator, self.ir, self._with(other)))

    def __lt__(self, other: Value | float) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Value | float) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Value | float) -> Value:
        return self._compare("==", other)

    def __getitem__(self, lane: int) -> Value:
        return Value(self.emitter, self.emitter.builder.extract_element(self.ir, ir.Constant(I32, lane)))


class Variable:
    """A stack slot for a value that changes in a loop; LLVM keeps it in a register."""

    def __init__(self, emitter: Emitter, initial: Value) -> None:
        self._emitter, self._type = emitter, initial.type
        with emitter.builder.goto_entry_block():
            self._slot = emitter.builder.alloca(initial.type)
        self.set(initial)

    def get(self) -> Value:
        return Value(self._emitter, self._emitter.builder.load(self._slot, typ=self._type))

    def set(self, value: Value) -> None:
        self._emitter.builder.store(value.ir, self._slot)


class Emitter:
    """Writes the body of one function. Parameters are `params` 64-bit integers; the result is one or nothing."""

    def __init__(self, module: ir.Module, name: str, params: int, *, returns: bool = False) -> None:
        self.module = module
        signature = ir.FunctionType(I64 if returns else VOID, [I64] * params)
        self.function = ir.Function(module, signature, name)
        self.function.attributes.add("nounwind")
        # The entry block holds stack slots only, so that a slot made inside a loop is still allocated once.
        entry, body = self.function.append_basic_block("entry"), self.function.append_basic_block("body")
        ir.IRBuilder(entry).branch(body)
        self.builder = ir.IRBuilder(body)
        self.params = [Value(self, argument) for argument in self.function.args]

    def number(self, value: float, type_: ir.Type = I64) -> Value:
        return Value(self, constant(type_, value))

    def lanes(self, values: Sequence[float], element: ir.Type) -> Value:
        return Value(self, constant(vector(element, len(values)), values))

    def variable(self, initial: Value) -> Variable:
        return Variable(self, initial)

    def finish(self, result: Value | None = None) -> None:
        if result is None:
            self.builder.ret_void()
        else:
            self.builder.ret(result.ir)

    # memory

    def _pointer(self, address: Value) -> Any:
        return self.builder.inttoptr(address.ir, POINTER)

    def load(self, type_: ir.Type, address: Value) -> Value:
        """A scalar or vector from an address that is good for one of its numbers."""
        return Value(self, self.builder.load(self._pointer(address), align=_alignment(type_), typ=type_))

    def store(self, value: Value, address: Value) -> None:
        self.builder.store(value.ir, self._pointer(address), align=_alignment(value.type))

    def prefetch(self, address: Value) -> None:
        """Ask for the cache line at any address; one that is not ours does no harm."""
        signature = ir.FunctionType(VOID, [POINTER, I32, I32, I32])
        function = self.module.globals.get("llvm.prefetch.p0")
        function = function or ir.Function(self.module, signature, "llvm.prefetch.p0")
        read, keep, data = (ir.Constant(I32, number) for number in (0, 3, 1))
        self.builder.call(function, [self._pointer(address), read, keep, data])

    def stack(self, bytes_: int) -> Value:
        """Address of scratch memory that lives until the function returns."""
        with self.builder.goto_entry_block():
            slot: Any = self.builder.alloca(I8, ir.Constant(I64, bytes_))
            slot.align = 64
            return Value(self, self.builder.ptrtoint(slot, I64))

    def table(self, numbers: Sequence[int]) -> Value:
        """Address of constant 64-bit integers."""
        type_ = ir.ArrayType(I64, len(numbers))
        name = f"table{sum(isinstance(v, ir.GlobalVariable) for v in self.module.global_values)}"
        data: Any = ir.GlobalVariable(self.module, type_, name)
        data.linkage, data.global_constant = "internal", True
        data.initializer = ir.Constant(type_, list(numbers))
        return Value(self, self.builder.ptrtoint(data, I64))

    # control

    @contextmanager
    def loop(self, start: Value | int, stop: Value, step: Value | int = 1) -> Iterator[Value]:
        """`for i in range(start, stop, step)` over 64-bit integers."""
        first = start if isinstance(start, Value) else self.number(start)
        index = self.variable(first)
        test = self.function.append_basic_block("test")
        body = self.function.append_basic_block("loop")
        done = self.function.append_basic_block("done")
        self.builder.branch(test)
        self.builder.position_at_end(test)
        self.builder.cbranch((index.get() < stop).ir, body, done)
        self.builder.position_at_end(body)
        current = index.get()
        yield current
        index.set(current + step)
        self.builder.branch(test)
        self.builder.position_at_end(done)

    @contextmanager
    def repeat(self) -> Iterator[Callable[[Value], None]]:
        """`while True`; calling what it yields with a condition leaves the loop when that holds."""
        body, done = self.function.append_basic_block("repeat"), self.function.append_basic_block("done")
        self.builder.branch(body)
        self.builder.position_at_end(body)

        def leave(condition: Value) -> None:
            more = self.function.append_basic_block("more")
            self.builder.cbranch(condition.ir, done, more)
            self.builder.position_at_end(more)

        yield leave
        self.builder.branch(body)
        self.builder.position_at_end(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition.ir):
            yield

    @contextmanager
    def otherwise(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(self.builder.not_(condition.ir)):
            yield

    def call(self, function: ir.Function, *arguments: Value | int) -> Value:
        values = [a.ir if isinstance(a, Value) else ir.Constant(I64, a) for a in arguments]
        return Value(self, self.builder.call(function, values))

    def call_address(self, address: Value, *arguments: Value) -> None:
        """Call a function of 64-bit integers without a result, known by its address only."""
        signature = ir.FunctionType(VOID, [I64] * len(arguments))
        self.builder.call(self.builder.inttoptr(address.ir, _FunctionPointer(signature)), [a.ir for a in arguments])

    def intrinsic(self, name: str, result: ir.Type, *arguments: Value) -> Value:
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return Value(self, self.builder.call(function, [a.ir for a in arguments]))

    # numbers

    def convert(self, value: Value, type_: ir.Type, how: str) -> Value:
        """`how` is an LLVM cast: zext, sext, trunc, bitcast, sitofp, fptosi, fpext, fptrunc."""
        return Value(self, getattr(self.builder, how)(value.ir, type_))

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self, self.builder.select(condition.ir, yes.ir, no.ir))

    def everywhere(self, conditions: Value) -> Value:
        """Do all lanes hold?"""
        lanes = conditions.lanes
        return self.convert(conditions, ir.IntType(lanes), "bitcast").equals(-1)

    def smaller(self, one: Value, other: Value) -> Value:
        return self.select(one < other, one, other)

    def fma(self, one: Value, other: Value, addend: Value) -> Value:
        """one * other + addend, fused where the processor can."""
        name = "llvm.fmuladd." + _suffix(one.type)
        return self.intrinsic(name, one.type, one, other, addend)

    def splat(self, value: Value, lanes: int) -> Value:
        """The scalar in every lane."""
        wide = vector(value.type, lanes)
        one = self.builder.insert_element(ir.Constant(wide, ir.Undefined), value.ir, ir.Constant(I32, 0))
        zeros = ir.Constant(vector(I32, lanes), [0] * lanes)
        return Value(self, self.builder.shuffle_vector(one, ir.Constant(wide, ir.Undefined), zeros))

    def insert(self, into: Value, value: Value, lane: int) -> Value:
        """A vector with one lane replaced."""
        return Value(self, self.builder.insert_element(into.ir, value.ir, ir.Constant(I32, lane)))

    def shuffle(self, one: Value, other: Value, lanes: Sequence[int]) -> Value:
        """Lane i of the result is lane `lanes[i]` of the two vectors laid end to end."""
        mask = ir.Constant(vector(I32, len(lanes)), list(lanes))
        return Value(self, self.builder.shuffle_vector(one.ir, other.ir, mask))

    def total(self, value: Value) -> Value:
        """Sum of the lanes of a float vector, by halving."""
        lanes = value.lanes
        while lanes > 1:
            lanes //= 2
            low = self.shuffle(value, value, range(lanes))
            value = low + self.shuffle(value, value, range(lanes, 2 * lanes))
        return value[0]


def _suffix(type_: ir.Type) -> str:
    return f"v{type_.count}f32" if isinstance(type_, ir.VectorType) else "f32"
