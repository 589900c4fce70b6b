package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/orchestrator/client"
	"github.com/cubesandbox/cube/orchestrator/client/gate"
)

// hostSuffix is what hosts' names end in that ssh takes for sandboxes, with the configuration that `cube ssh --config` prints.
const hostSuffix = ".cube"

func sshCommand() *cli.Command {
	return &cli.Command{
		Name:      "ssh",
		Usage:     "get into a sandbox with OpenSSH's ssh, by the API's key",
		ArgsUsage: "ID [COMMAND [ARG...]]",
		Description: "The sandbox needs no SSH server. For scp, sftp and what else runs ssh: cube ssh --config >> ~/.ssh/config, and then ID" + hostSuffix + " is the host.\n" +
			"$" + client.EnvAPI + " and $" + client.EnvKey + " say where and who, or E2B's variables.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "login", Aliases: []string{"l"}, Usage: "be that `USER` of the sandbox", DefaultText: "its default user"},
			&cli.BoolFlag{Name: "tty", Aliases: []string{"t"}, Usage: "give a command a terminal, too"},
			&cli.BoolFlag{Name: "no-command", Aliases: []string{"N"}, Usage: "only forward ports"},
			&cli.StringSliceFlag{Name: "forward", Aliases: []string{"L"}, Usage: "lead a port here to one there, as ssh's -L: `PORT:localhost:PORT`"},
			&cli.BoolFlag{Name: "stdio", Usage: "be ssh's ProxyCommand: speak SSH on stdin and stdout"},
			&cli.BoolFlag{Name: "config", Usage: "print what has ssh find sandboxes, for its configuration"},
		},
		Action: func(c *cli.Context) error {
			var err error
			switch {
			case c.Bool("config"):
				err = sshConfig(c)
			case c.Bool("stdio"):
				return withKey(serveSSH)(c)
			default:
				err = runSSH(c)
			}
			if err != nil {
				return fmt.Errorf("ssh: %w", err)
			}
			return nil
		},
	}
}

// gateDir is where the user's host key is.
func gateDir() (string, error) {
	dir, err := os.UserConfigDir()
	if err != nil {
		return "", fmt.Errorf("no place for a host key: %w", err)
	}
	return filepath.Join(dir, "cube"), nil
}

// serveSSH is ssh's ProxyCommand.
func serveSSH(c *cli.Context, api *client.Client) error {
	if c.NArg() != 1 {
		return errors.New("--stdio takes one sandbox")
	}
	dir, err := gateDir()
	if err != nil {
		return err
	}
	key, _, err := gate.HostKey(dir)
	if err != nil {
		return err
	}
	guest, err := api.Enter(c.Context, strings.TrimSuffix(c.Args().First(), hostSuffix))
	if err != nil {
		return err
	}
	return gate.Serve(c.Context, gate.Pipe{In: os.Stdin, Out: os.Stdout}, key, guest)
}

// sshOptions have ssh reach sandboxes by this program.
func sshOptions() ([][2]string, error) {
	dir, err := gateDir()
	if err != nil {
		return nil, err
	}
	_, knownHosts, err := gate.HostKey(dir)
	if err != nil {
		return nil, err
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	for _, path := range []string{exe, knownHosts} {
		if strings.ContainsAny(path, "\"'\\%$` \t\n") {
			return nil, fmt.Errorf("%q has a character that means something to ssh: have cube, and the user's configuration, where none has", path)
		}
	}
	return [][2]string{
		{"ProxyCommand", exe + " ssh --stdio %n"},
		{"HostKeyAlias", gate.HostAlias},
		{"UserKnownHostsFile", knownHosts},
		{"GlobalKnownHostsFile", "none"},
		{"StrictHostKeyChecking", "yes"},
		{"PreferredAuthentications", "none"},
		{"ForwardAgent", "no"},
	}, nil
}

func sshConfig(c *cli.Context) error {
	if c.NArg() > 0 {
		return errors.New("--config takes no sandbox: it is for all of them")
	}
	options, err := sshOptions()
	if err != nil {
		return err
	}
	fmt.Fprintf(c.App.Writer, "Host *%s\n    User %s\n", hostSuffix, gate.DefaultUser)
	for _, o := range options {
		fmt.Fprintf(c.App.Writer, "    %s %s\n", o[0], o[1])
	}
	return nil
}

// runSSH becomes ssh.
func runSSH(c *cli.Context) error {
	args := c.Args().Slice()
	if len(args) == 0 {
		return errors.New("which sandbox? `cube ps` lists them")
	}
	if err := client.CheckID(args[0]); err != nil {
		return err
	}
	ssh, err := exec.LookPath("ssh")
	if err != nil {
		return fmt.Errorf("OpenSSH's client isn't installed (Debian's openssh-client): %w", err)
	}
	options, err := sshOptions()
	if err != nil {
		return err
	}
	argv := []string{"ssh"}
	for _, o := range options {
		argv = append(argv, "-o", o[0]+"="+o[1])
	}
	user := gate.DefaultUser
	if c.IsSet("login") {
		user = c.String("login")
	}
	argv = append(argv, "-l", user)
	if c.Bool("tty") {
		argv = append(argv, "-t")
	}
	if c.Bool("no-command") {
		argv = append(argv, "-N")
	}
	for _, forward := range c.StringSlice("forward") {
		argv = append(argv, "-o", "ExitOnForwardFailure=yes", "-L", forward)
	}
	command := args[1:]
	if len(command) > 0 && command[0] == "--" {
		command = command[1:]
	}
	argv = append(append(argv, "--", args[0]+hostSuffix), command...)
	return unix.Exec(ssh, argv, os.Environ())
}
