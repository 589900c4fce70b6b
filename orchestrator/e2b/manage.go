package e2b

import (
	"math"
	"net/http"
	"time"
)

const (
	refreshMost = 3600 // seconds
	forkMost    = 100
)

// on is a call about one sandbox. What it reads of the body is checked before anything is done.
func on(f func(c *call, id string) (answer, error)) func(*call) (answer, error) {
	return func(c *call) (answer, error) {
		id, err := c.sandbox()
		if err != nil {
			return answer{}, err
		}
		return f(c, id)
	}
}

func (s *Server) get(c *call, id string) (answer, error) {
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	sb, err := s.engine.Get(c.ctx, c.team, id)
	if err != nil {
		return answer{}, err
	}
	return ok(s.detail(sb)), nil
}

func (s *Server) kill(c *call, id string) (answer, error) {
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	return done, s.engine.Kill(c.ctx, c.team, id)
}

// setTimeout takes what is below 0 for 0, which is the end.
func (s *Server) setTimeout(c *call, id string) (answer, error) {
	c.body.Require("timeout")
	d := time.Duration(max(c.body.Int("timeout", 0, math.MinInt32, math.MaxInt32), 0)) * time.Second
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	return done, s.engine.SetTimeout(c.ctx, c.team, id, d)
}

func (s *Server) refresh(c *call, id string) (answer, error) {
	d := time.Duration(c.body.Int("duration", 0, 0, refreshMost)) * time.Second
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	return done, s.engine.Refresh(c.ctx, c.team, id, d)
}

// connect makes sure that a sandbox runs. SDKs of the first generation say for how long.
func (s *Server) connect(g generation) func(*call, string) (answer, error) {
	return func(c *call, id string) (answer, error) {
		if g == v1 {
			c.body.Require("timeout")
		}
		d := s.timeoutIn(c.body, g.timeout, 0)
		memory := optional(c, "memory")
		if err := c.checked(); err != nil {
			return answer{}, err
		}
		sb, resumed, err := s.engine.Connect(c.ctx, c.team, id, d, memory)
		if err != nil {
			return answer{}, err
		}
		a := ok(s.sandbox(sb))
		if resumed {
			a.status = http.StatusCreated
		}
		return a, nil
	}
}

func (s *Server) resume(c *call, id string) (answer, error) {
	d := s.timeoutIn(c.body, timeoutV1, 1)
	memory := optional(c, "memory")
	if c.body.Bool("autoPause", false) {
		c.body.Fail("autoPause", "%s: a sandbox keeps what it was created with", notYet)
	}
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	sb, err := s.engine.Resume(c.ctx, c.team, id, d, memory)
	if err != nil {
		return answer{}, err
	}
	return created(s.sandbox(sb)), nil
}

func (s *Server) pause(c *call, id string) (answer, error) {
	memory := c.body.Bool("memory", true)
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	return done, s.engine.Pause(c.ctx, c.team, id, memory)
}

// forkBody is a child, or why there isn't one.
type forkBody struct {
	Sandbox *sandboxBody `json:"sandbox,omitempty"`
	Error   *errorBody   `json:"error,omitempty"`
}

func (s *Server) fork(c *call, id string) (answer, error) {
	d := s.timeoutIn(c.body, timeoutV1, 1)
	n := c.body.Int("count", 1, 1, forkMost)
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	results, err := s.engine.Fork(c.ctx, c.team, id, d, n)
	if err != nil {
		return answer{}, err
	}
	bodies := make([]forkBody, 0, len(results))
	for _, r := range results {
		if r.Err != nil {
			why, _ := explain(r.Err, c.id)
			if why.Code >= http.StatusInternalServerError {
				s.log.Error("a child of a fork has failed", "request", c.id, "sandbox", id, "error", r.Err)
			}
			bodies = append(bodies, forkBody{Error: &why})
			continue
		}
		child := s.sandbox(r.Sandbox)
		bodies = append(bodies, forkBody{Sandbox: &child})
	}
	return created(bodies), nil
}

// initAgain gives a sandbox another environment, and has the init hook of its template told of it. The same request twice is
// done once: clients name it in the header.
func (s *Server) initAgain(c *call, id string) (answer, error) {
	c.body.Require("envVars")
	env := c.body.StringMap("envVars")
	checkEnv(c.body, "envVars", env)
	if c.named != "" && c.named != c.id {
		c.note(invalid("%s: %s can't be a request's name, which is up to 128 visible ASCII characters", requestHeader, quote(c.named)))
	}
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	return done, s.engine.InitAgain(c.ctx, c.team, id, env, c.id)
}

// optional is a boolean of the body that needs not be there.
func optional(c *call, name string) *bool {
	v := c.body.Bool(name, true)
	if !c.body.Has(name) {
		return nil
	}
	return &v
}
