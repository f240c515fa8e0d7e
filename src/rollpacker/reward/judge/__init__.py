"""The LLM judge: a language model that grades responses, most of its layers in host memory.

It knows nothing of the policy's schedule beyond what it is told to use.
"""
