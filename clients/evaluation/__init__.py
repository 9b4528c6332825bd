"""What a site measures: right answers, and statistics of a network on its images."""
