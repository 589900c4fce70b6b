package api

import (
	"context"
	"encoding/json"
	"net/http"

	"github.com/cubesandbox/cube/internal/control"
	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/builds"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

// RegistryUser is whom a registry is asked as; without a name, as nobody. It is kept nowhere.
type RegistryUser struct {
	User     string `json:"user,omitempty"`
	Password string `json:"password,omitempty"`
}

func (u RegistryUser) registry() *templates.Registry {
	if u == (RegistryUser{}) {
		return nil
	}
	return &templates.Registry{User: u.User, Password: u.Password}
}

type (
	pullRequest struct {
		builds.PullRequest
		As RegistryUser `json:"as"`
	}
	pushRequest struct {
		To string       `json:"to"`
		As RegistryUser `json:"as"`
	}
	// pushLine is one of a push's: all but the last one tell how far it is.
	pushLine struct {
		Message string `json:"message,omitempty"`
		Pushed  string `json:"pushed,omitempty"` // the name with the digest
	}
)

// registry are routes, by pattern.
func (s *Service) registry(mux *http.ServeMux) {
	mux.HandleFunc("POST /v1/templates/pull", withBuilds(s, func(r *http.Request, b *builds.Service, in pullRequest) (BuildID, error) {
		made, err := b.Pull(r.Context(), in.PullRequest, in.As.registry())
		return BuildID{made.Template, made.Build}, err
	}))
	mux.HandleFunc("POST /v1/templates/{team}/{name}/push", func(w http.ResponseWriter, r *http.Request) {
		var in pushRequest
		ref, err := db.ParseRef(r.PathValue("name"))
		if err == nil {
			err = control.Body(w, r, &in)
		}
		b := s.builds.Load()
		if err == nil && b == nil {
			err = errNotReady
		}
		if err != nil {
			control.Answer(w, nil, err)
			return
		}
		lines := control.NewLines(w)
		ctx := audit.With(r.Context(), audit.By{Via: audit.CLI})
		at, err := b.Push(ctx, r.PathValue("team"), ref, in.To, in.As.registry(), func(message string) { lines.Tell(pushLine{Message: message}) })
		lines.End(pushLine{Pushed: at}, err)
	})
}

// Pull asks for a build that is what a registry has.
func (c *Client) Pull(ctx context.Context, r builds.PullRequest, as RegistryUser) (id BuildID, err error) {
	err = control.Send(ctx, c.socket, http.MethodPost, Root+"templates/pull", pullRequest{r, as}, &id)
	return id, err
}

// Push has a registry have a team's template, tells how far it is, and returns the name that it has there by its digest.
func (c *Client) Push(ctx context.Context, team, name, to string, as RegistryUser, tell func(message string)) (at string, err error) {
	path, err := templatePath(team, name)
	if err != nil {
		return "", err
	}
	err = control.Follow(ctx, c.socket, path+"/push", pushRequest{to, as}, func(b json.RawMessage) error {
		var l pushLine
		if err := json.Unmarshal(b, &l); err != nil {
			return err
		}
		if l.Message != "" {
			tell(l.Message)
		}
		at = l.Pushed
		return nil
	})
	return at, err
}
