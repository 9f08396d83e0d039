"""Trust: pairing, the roster and admission; pure protocols stand beside their drivers."""
