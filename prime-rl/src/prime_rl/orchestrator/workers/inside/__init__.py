"""What runs in an environment's own interpreter.

It imports only the standard library and what verifiers itself needs, for Python 3.10 and later: nothing has to be
installed next to the environment. `__main__.py` starts it by its path.
"""
