"""Arithmetic without `eval`: the expression is parsed, and only numbers, operators and known functions are evaluated."""

import ast
import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Annotated

from pydantic import Field

from agent_runtime.tools.base import FunctionTool, ToolError

Number = int | float

EXPRESSION_CHARACTERS = 1000
INTEGER_BITS = 10_000
"""Bits of the largest integer: 3,000 digits, computed in microseconds."""
LARGEST_FACTORIAL = 1000
"""1000! has 8,530 bits."""


def calculate(expression: str, precision: int = 12) -> str:
    """Return the value of an expression; integers exactly, others with `precision` significant digits.

    Raises ToolError for an invalid expression, an undefined value, or one that is too large.
    """
    if len(expression) > EXPRESSION_CHARACTERS:
        raise ToolError(
            f"the expression has {len(expression)} characters; at most {EXPRESSION_CHARACTERS} are accepted"
        )
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ToolError:
        raise
    except SyntaxError as error:
        raise ToolError(f"{expression!r} is not an expression: {error.msg}") from error
    except ZeroDivisionError:
        raise ToolError(f"{expression!r} divides by zero") from None
    except (RecursionError, MemoryError):
        raise ToolError("the expression is nested too deeply; compute it in parts") from None
    except (ValueError, OverflowError, TypeError) as error:
        raise ToolError(f"{expression!r} has no value: {error}") from error
    return str(value) if isinstance(value, int) else format(value, f".{precision}g")


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*(_value(argument) for argument in arguments)))
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            raise ToolError(
                f"{name!r} is unknown; expected {', '.join(_CONSTANTS)}, or one of the functions "
                f"{', '.join(_FUNCTIONS)}"
            )
        case _:
            raise ToolError(
                f"{ast.unparse(node)!r} is not arithmetic; use numbers, + - * / // % **, parentheses and functions"
            )


def _bounded(value: object) -> Number:
    if isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() > INTEGER_BITS:
            raise ToolError(f"a whole number exceeds {INTEGER_BITS} bits; use decimals, such as 2.0 ** 900")
        return value
    if isinstance(value, float):
        return value
    raise ToolError(f"{value} is not a real number")


def _power(base: Number, exponent: Number) -> Number:
    # Check before computing, because 9**9**9 would use up all memory.
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > 2 * INTEGER_BITS:
        raise ToolError(f"{base} ** {exponent} is too large; use decimals, such as {base}.0 ** {exponent}")
    return _bounded(base**exponent)


def _small(function: Callable[..., Number]) -> Callable[..., Number]:
    """Limit the arguments of an integer function whose result grows fast."""

    def checked(*arguments: Number) -> Number:
        if any(abs(argument) > LARGEST_FACTORIAL for argument in arguments):
            raise ToolError(f"{function.__name__} takes numbers up to {LARGEST_FACTORIAL}")
        return function(*arguments)

    return checked


def _round(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 100:
        raise ToolError("round accepts a whole number of digits up to 100")
    return round(value, digits) if digits else round(value)


_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_PLAIN: list[Callable[..., Number]] = [
    *(math.sqrt, math.exp, math.log, math.log2, math.log10, math.hypot, math.degrees, math.radians),
    *(math.sin, math.cos, math.tan, math.asin, math.acos, math.atan, math.atan2, math.sinh, math.cosh, math.tanh),
    *(math.floor, math.ceil, math.trunc, math.gcd, math.lcm, math.isqrt),
]
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    **{function.__name__: function for function in _PLAIN},
    **{function.__name__: _small(function) for function in (math.factorial, math.comb, math.perm)},
    "abs": abs,
    "min": min,
    "max": max,
    "pow": _power,
    "round": _round,
}


@partial(FunctionTool, runs_in="Runner", idempotent=True)
async def calculator(
    expression: Annotated[str, "For instance (3 + 4) * sqrt(2) or comb(10, 3) / 2 ** 10."],
    precision: Annotated[int, Field(ge=1, le=17, description="Significant digits of a result that is not whole.")] = 12,
) -> str:
    """Compute an arithmetic expression: + - * / // % **, parentheses, pi, e, and functions such as sqrt, log, sin,
    floor, gcd, factorial, comb, min, max and round."""
    return calculate(expression, precision)
