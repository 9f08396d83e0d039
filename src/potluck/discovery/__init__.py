"""Discovery: nodes find each other by mDNS, on one machine, and by known peers."""
