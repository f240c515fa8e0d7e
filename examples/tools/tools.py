"""The tool that the model may call: a calculator."""

from __future__ import annotations

import ast
import operator

LONGEST = 100
REFUSED = "only whole numbers with +, - and * can be calculated"
"""What the model is told of any other expression."""
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> str:
    """Calculate the value of an expression.

    Args:
        expression: Whole numbers with +, - and *.

    Returns:
        The value.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(REFUSED) from None
    return str(_value(tree.body))


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=value) if type(value) is int:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError(REFUSED)
