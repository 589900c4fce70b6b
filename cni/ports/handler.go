package ports

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/control"
)

// ServeHTTP answers Update and List, for whom the whole network is open anyway.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, id := r.Context(), r.FormValue("id")
	switch {
	case r.Method == http.MethodGet:
		var list []State
		err := s.call(ctx, func() { list = s.states(id) })
		control.Answer(w, list, err)
	case r.Method == http.MethodPost && id != "":
		var failed error
		err := s.call(ctx, func() { failed = s.update(ctx, id) })
		control.Answer(w, nil, cmp.Or(err, failed))
	default:
		control.Answer(w, nil, fmt.Errorf("%s of port mappings with id %q: it is GET, or POST with an id: %w", r.Method, id, errdefs.ErrInvalidArgument))
	}
}

// states lists the ports of a sandbox, or of all.
func (s *Server) states(id string) []State {
	list := []State{}
	for key, have := range s.all {
		if id != "" && key != id {
			continue
		}
		for _, m := range have {
			st := State{Port: m.lease.Port, ID: key}
			if m.err != nil {
				st.Reason = m.err.Error()
			}
			list = append(list, st)
		}
	}
	slices.SortFunc(list, func(a, b State) int {
		return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(a.Protocol, b.Protocol), a.HostIP.Compare(b.HostIP), cmp.Compare(a.HostPort, b.HostPort))
	})
	return list
}
