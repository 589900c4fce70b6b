package api

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/control"
	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/teams"
	"github.com/cubesandbox/cube/orchestrator/usage"
)

// Root is where the API is on the control socket.
const Root = "/v1/"

// The bodies of requests and answers.
type (
	saveRequest struct {
		Name string `json:"name"`
	}
	saveAnswer struct {
		Name string `json:"name"`
	}
	resumeAnswer struct {
		Note string `json:"note,omitempty"`
	}
	rollbackRequest struct {
		Snapshot string `json:"snapshot"`
	}
	cloneRequest struct {
		Count *int `json:"count"` // default: 1
	}
	cloneAnswer struct {
		IDs    []string `json:"ids"`
		Failed []string `json:"failed,omitempty"`
	}
	deleteAnswer struct {
		UsedBy []string `json:"used_by"`
	}
	pruneRequest struct {
		DryRun bool `json:"dry_run"`
		// Retention is what is kept, instead of what the daemon was configured with.
		Retention *config.Retention `json:"retention,omitempty"`
	}
	pruneAnswer struct {
		usage.Freed
		Failed string `json:"failed,omitempty"`
	}
	nothing struct{}
)

// Handler serves the API, with paths from Root on.
func (s *Service) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/containers/{id}/snapshots", serve(func(r *http.Request, in saveRequest) (saveAnswer, error) {
		name, err := s.Save(r.Context(), r.PathValue("id"), in.Name)
		return saveAnswer{name}, err
	}))
	mux.HandleFunc("POST /v1/containers/{id}/pause", serve(func(r *http.Request, _ nothing) (nothing, error) {
		return nothing{}, s.Pause(r.Context(), r.PathValue("id"))
	}))
	mux.HandleFunc("POST /v1/containers/{id}/resume", serve(func(r *http.Request, _ nothing) (resumeAnswer, error) {
		note, err := s.Resume(r.Context(), r.PathValue("id"))
		return resumeAnswer{note}, err
	}))
	mux.HandleFunc("POST /v1/containers/{id}/rollback", serve(func(r *http.Request, in rollbackRequest) (nothing, error) {
		return nothing{}, s.Rollback(r.Context(), r.PathValue("id"), in.Snapshot)
	}))
	mux.HandleFunc("POST /v1/containers/{id}/clone", serve(func(r *http.Request, in cloneRequest) (cloneAnswer, error) {
		n := 1
		if in.Count != nil {
			n = *in.Count
		}
		ids, failed := s.Clone(r.Context(), r.PathValue("id"), n)
		if len(ids) == 0 {
			return cloneAnswer{}, errors.Join(failed...)
		}
		a := cloneAnswer{IDs: ids}
		for _, err := range failed {
			a.Failed = append(a.Failed, err.Error())
		}
		return a, nil
	}))
	mux.HandleFunc("GET /v1/snapshots", serve(func(r *http.Request, _ nothing) ([]Snapshot, error) { return s.Snapshots(r.Context()) }))
	mux.HandleFunc("GET /v1/snapshots/{name}", serve(func(r *http.Request, _ nothing) (Snapshot, error) {
		return s.Snapshot(r.Context(), r.PathValue("name"))
	}))
	mux.HandleFunc("DELETE /v1/snapshots/{name}", serve(func(r *http.Request, _ nothing) (deleteAnswer, error) {
		users, err := s.DeleteSnapshot(r.Context(), r.PathValue("name"))
		return deleteAnswer{users}, err
	}))
	s.templates(mux)
	s.registry(mux)
	mux.HandleFunc("GET /v1/usage", serve(func(r *http.Request, _ nothing) (usage.Usage, error) { return s.Usage(r.Context()) }))
	mux.HandleFunc("POST /v1/prune", serve(func(r *http.Request, in pruneRequest) (pruneAnswer, error) {
		freed, err := s.Prune(r.Context(), in.DryRun, in.Retention)
		if err == nil || len(freed.Items) == 0 {
			return pruneAnswer{Freed: freed}, err
		}
		return pruneAnswer{freed, err.Error()}, nil
	}))
	mux.HandleFunc("DELETE /v1/teams/{team}", serve(func(r *http.Request, _ nothing) (teams.Report, error) {
		return s.PurgeTeam(r.Context(), r.PathValue("team"))
	}))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		control.Answer(w, nil, errdefs.ErrNotFound.WithMessage(fmt.Sprintf("the API has no %s %s", r.Method, r.URL.Path)))
	})
	return mux
}

// serve is a handler of requests that have a body of one kind, and nothing else than that.
func serve[In, Out any](f func(*http.Request, In) (Out, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var in In
		var out Out
		var err error
		if r.URL.RawQuery != "" {
			err = errdefs.ErrInvalidArgument.WithMessage("it takes no query: what it takes is in the body")
		}
		if err == nil {
			err = control.Body(w, r, &in)
		}
		if err == nil {
			out, err = f(r.WithContext(audit.With(r.Context(), audit.By{Via: audit.CLI})), in)
		}
		control.Answer(w, out, err)
	}
}
