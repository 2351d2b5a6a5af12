"""Machine-level facts and services: CPU support, process groups, errors. Imports no other room."""
