"""The Redis door: jobs come from a consumer group, tokens go to one stream a job."""
