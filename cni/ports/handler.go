package ports

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errhttp"
)

// ServeHTTP answers Update and List, for whom the whole network is open anyway.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := r.FormValue("id")
	var err error
	switch {
	case r.Method == http.MethodGet:
		var list []State
		if err = s.call(r.Context(), func() { list = s.states(id) }); err == nil {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(list) // the client has gone away
			return
		}
	case r.Method == http.MethodPost && id != "":
		if cerr := s.call(r.Context(), func() { err = s.update(r.Context(), id) }); cerr != nil {
			err = cerr
		}
	default:
		err = fmt.Errorf("%s of port mappings with id %q: it is GET, or POST with an id: %w", r.Method, id, errdefs.ErrInvalidArgument)
	}
	if err != nil {
		http.Error(w, err.Error(), errhttp.ToHTTP(err))
	}
}

func compareStates(a, b State) int {
	return cmp.Or(cmp.Compare(a.ID, b.ID), a.HostIP.Compare(b.HostIP), cmp.Compare(a.HostPort, b.HostPort), cmp.Compare(a.Protocol, b.Protocol))
}
