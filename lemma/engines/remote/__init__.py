"""Generation servers on this machine or others: their processes, clients, pool, weights, and the guard before them."""
