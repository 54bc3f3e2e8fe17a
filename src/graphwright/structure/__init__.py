"""Structure that is trained like a weight: gates, relaxations, losses, policies, the joint optimizer, search."""
