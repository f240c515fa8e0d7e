"""Answers a question with a calculator. A plain program of OpenAI's client; training runs it as is.

It reads a row (``question``, ``answer``) and prints what its answer is worth. Training may also
call ``solve``, with no process for each response.
"""

import json
import os
import re
import sys

from openai import OpenAI  # pyright: ignore[reportMissingImports]

# As the model of examples/tools has read it.
EXPRESSION = {"type": "string", "description": "Whole numbers with +, - and *."}
CALCULATE = {
    "name": "calculate",
    "description": "Calculate the value of an expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": EXPRESSION},
        "required": ["expression"],
    },
    "return": {"type": "string", "description": "The value."},
}


def calculate(expression: str) -> str:
    if not re.fullmatch(r"\d{1,9}( ?[-+*] ?\d{1,9}){0,9}", expression):
        raise ValueError("only whole numbers with +, - and * can be calculated")
    return str(eval(expression))


def result(call) -> str:
    if call.function.name != "calculate":
        return f"Error: there is no tool '{call.function.name}': there is calculate"
    try:
        return calculate(**json.loads(call.function.arguments))
    except Exception as error:  # the model reads what was wrong with its call
        return f"Error: {type(error).__name__}: {error}"


CLIENT = OpenAI(api_key=os.environ.get("OPENAI_API_KEY", "each episode has its own"))


def solve(row: dict, **client: str) -> dict:
    # The same connections with another key: they are dear to make.
    create = CLIENT.with_options(**client).chat.completions.create
    tools = [{"type": "function", "function": CALCULATE}]
    messages, results = [{"role": "user", "content": row["question"]}], []
    while True:
        reply = create(model="policy", messages=messages, tools=tools).choices[0].message
        messages.append(reply)
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            results.append(result(call))
            tool = {"role": "tool", "tool_call_id": call.id}
            messages.append({**tool, "content": results[-1]})
    right = reply.content == f"The answer is {row['answer']}."
    worth = {"reward": float(right)}
    return worth | ({"right_calls": results.count(row["answer"]) / len(results)} if results else {})


if __name__ == "__main__":
    print(json.dumps(solve(json.loads(sys.stdin.readline()))))
