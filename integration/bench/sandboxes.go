package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/integration/stack"
)

// sandboxes measures E2B's API with real machines, on a stack of its own without the warm pool.
func sandboxes(ctx context.Context, root string, n int) error {
	return onStack(ctx, root, func(u *user) error {
		if err := u.creates(n); err != nil {
			return err
		}
		return u.inside(n)
	})
}

// onStack does something as a user of a stack that has the template base, with more configuration.
func onStack(ctx context.Context, root string, do func(*user) error, more ...string) (err error) {
	s, err := stack.Start(root, more...)
	if s != nil { // with an error, too
		defer func() { err = errors.Join(err, s.Stop()) }()
	}
	if err != nil {
		return err
	}
	if err := s.BuildBase(); err != nil {
		return err
	}
	r := s.Cube("key", "create")
	if r.Err != nil {
		return r.Err
	}
	u := &user{Stack: s, ctx: ctx, key: strings.TrimSpace(r.Stdout)}
	u.http = &http.Client{Transport: &http.Transport{DialContext: u.dial, MaxIdleConnsPerHost: 100}}
	defer u.http.CloseIdleConnections()
	(&bench{Stack: s}).conditions()
	return do(u)
}

// user is one who has a key.
type user struct {
	*stack.Stack
	ctx  context.Context
	key  string
	http *http.Client
}

// sandbox is what a create answers.
type sandbox struct {
	ID    string `json:"sandboxID"`
	Token string `json:"envdAccessToken"`
}

// dial connects as a program on the stack's host does.
func (u *user) dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = u.Host.Do(func() error {
		var d net.Dialer
		c, err = d.DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// api asks the API. The answer is decoded to into, unless that is nil.
func (u *user) api(method, path string, body string, into any) error {
	req, err := http.NewRequestWithContext(u.ctx, method, "http://"+u.Config.API.Listen.String()+path, strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("X-API-KEY", u.key)
	answer, err := u.do(req)
	if err != nil || into == nil {
		return err
	}
	return json.Unmarshal(answer, into)
}

// do has a request answered, with a status of success.
func (u *user) do(req *http.Request) ([]byte, error) {
	resp, err := u.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var answer bytes.Buffer
	if _, err := io.Copy(&answer, resp.Body); err != nil {
		return nil, err
	}
	if resp.StatusCode/100 != 2 {
		return nil, refused(resp, answer.Bytes())
	}
	return answer.Bytes(), nil
}

// create makes a sandbox, and returns when its envd has answered by the proxy.
func (u *user) create() (sb sandbox, took time.Duration, err error) {
	sb, _, took, err = u.timed()
	return sb, took, err
}

// timed is create, and tells when the API had answered, too.
func (u *user) timed() (sb sandbox, post, took time.Duration, err error) {
	began := time.Now()
	if err := u.api(http.MethodPost, "/v2/sandboxes", `{"templateID": "base", "timeout": 3600}`, &sb); err != nil {
		return sb, 0, 0, err
	}
	post = time.Since(began)
	req, err := u.byProxy(sb).request(u.ctx, http.MethodGet, "/health", nil)
	if err == nil {
		_, err = u.do(req)
	}
	return sb, post, time.Since(began), err
}

// creates measures creates, so many at once.
func (u *user) creates(n int) error {
	fmt.Printf("\n## E2B's API: create, 201, and envd has answered by the proxy\n\nA template of 2 vCPUs and 512 MiB, nothing of it in memory but what sandboxes that run have there.\n\n" +
		"| at once | n | p50 ms | p95 ms | the last of those at once, p50 ms | load before |\n| --- | --- | --- | --- | --- | --- |\n")
	warm, _, err := u.create() // the copy of the template's memory stays with it
	if err != nil {
		return err
	}
	for _, at := range []int{1, 5, 10, 20} {
		load := loadNow()
		var all, last sample
		for range max(1, n/at) {
			made, took := make([]sandbox, at), make(sample, at)
			var g errgroup.Group
			for i := range at {
				g.Go(func() (err error) {
					made[i], took[i], err = u.create()
					return err
				})
			}
			if err := g.Wait(); err != nil {
				return err
			}
			all, last = append(all, took...), append(last, took.quantile(1))
			if err := u.kill(made...); err != nil {
				return err
			}
		}
		fmt.Printf("| %d | %d | %.0f | %.0f | %.0f | %s |\n", at, len(all), ms(all.quantile(0.5)), ms(all.quantile(0.95)), ms(last.quantile(0.5)), load)
	}
	fmt.Print(`
TencentCloud/CubeSandbox v0.3 of itself, the POST alone, at 1, 10 and 20 at once, mean and p95: 48 and 57, 89 and 117, 98 and 176 ms (2 Xeon 8255C with 96
threads, 375 GiB, NVMe, KVM); 67 and 78, 171 and 217, 365 and 521 ms (EPYC 9K65, 16 vCPU, 32 GiB, PVM).
`)
	return u.kill(warm)
}

func (u *user) kill(all ...sandbox) error {
	var g errgroup.Group
	for _, sb := range all {
		g.Go(func() error { return u.api(http.MethodDelete, "/sandboxes/"+sb.ID, "", nil) })
	}
	return g.Wait()
}
