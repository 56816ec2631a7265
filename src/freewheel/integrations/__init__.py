"""freewheel inside other trainers: each module here is for one library, and imports only when that one is used."""
