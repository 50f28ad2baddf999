"""A model behind OpenAI's HTTP API: for `lemma serve`, and for agents during rollouts.

The server's handler threads pass requests to one driver, the only user of the engine, so that the requests of all
clients are batched together.
"""
