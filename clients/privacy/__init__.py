"""What a site discloses and spends, decided at the site: its policy, differential privacy, secure aggregation."""
