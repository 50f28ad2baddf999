"""A model behind the wire that OpenAI's clients speak: for `lemma serve`, and for agents during rollouts.

Handler threads of the server hand requests to one driver, which alone uses the engine, so that all clients generate
together.
"""
