"""A model for programs: three well-known interfaces, and what is asked at once computed at once."""
